"use strict";
// The layers under the grid: which number they show, of which replica, and the lines of chosen layers.
// Choices stand in the page's address; a click on the heat map adds the line of the layer under it.
window.andonLayers = function (stack) {
  const { box, plot, state, view } = stack;
  const cap = box.querySelector("[data-cap=layers]"), add = cap.querySelector("[data-add-line]");
  const replica = cap.querySelector("[data-view=replica]"), MOST = 4;
  let names = [];

  function option(value, text) {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = text;
    return made;
  }

  function lines() { return state.meta.layers.lines.map((line) => line.layer); }

  function choose(layer) {
    const now = lines();
    if (!now.includes(layer)) view({ line: [...now, layer].slice(-MOST) });
  }

  function fill(layers) {
    if (names.join("\n") !== layers.names.join("\n")) {
      names = layers.names;
      add.replaceChildren(option("", "Add a layer's line"), ...names.map((name) => option(name, name)));
    }
    add.value = "";
    const many = layers.replicas.length;
    replica.hidden = many < 2;
    if (replica.options.length !== many + 1) {
      replica.replaceChildren(option("", "worst of " + many + " replicas"), ...layers.replicas.map((rank) => option(String(rank), "rank " + rank)));
    }
    const steps = cap.querySelectorAll("[data-ramp] span");
    layers.words.forEach((word, at) => { steps[at].textContent = word; steps[at].parentNode.hidden = !word; });
    cap.querySelector("[data-layers-says]").textContent = layers.says;
  }

  function captions(layers, rows, offset) {
    for (const old of box.querySelectorAll("[data-line]")) old.remove();
    for (const line of layers.lines) {
      const at = document.createElement("span"), name = document.createElement("b"), says = document.createElement("span");
      const remove = document.createElement("button");
      at.className = "inl";
      at.dataset.line = line.layer;
      name.textContent = line.label + " ";
      says.textContent = line.says + " ";
      remove.type = "button";
      remove.className = "plain";
      remove.textContent = "remove";
      remove.setAttribute("aria-label", "Remove the line of " + line.label);
      remove.addEventListener("click", () => view({ line: lines().filter((one) => one !== line.layer) }));
      at.style.top = offset + rows[line.row][0] - 17 + "px";
      at.append(name, remove, " ", says);
      box.append(at);
    }
  }

  add.addEventListener("change", () => { if (add.value) choose(add.value); });
  return {
    place(offset) {
      const { layers, rows } = state.meta;
      if (!layers) { for (const old of box.querySelectorAll("[data-line]")) old.remove(); return; }
      fill(layers);
      captions(layers, rows, offset);
    },
    listen() {
      plot.addEventListener("click", (event) => {
        const { layers, rows } = state.meta;
        if (!layers || !rows.layers) return;
        const [top, height] = rows.layers, share = (event.clientY - plot.getBoundingClientRect().top - top) / height;
        if (share >= 0 && share < 1) choose(names[Math.floor(share * names.length)]);
      });
    },
  };
};
