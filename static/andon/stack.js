"use strict";
// The stack of grid, layers and curves: one Plotly figure made on the server, with its tiles put in here,
// an overview that can be dragged, exact cells for the readout, and keys. The view is in the page's address.
(function () {
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, scrollZoom: false, showTips: false };
  const root = document.documentElement;
  const stacks = Array.from(document.querySelectorAll("[data-stack]")).map(start);

  function token(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  function theme() {
    const chosen = root.dataset.theme;
    if (chosen) return chosen;
    return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  // Colours are tokens until now, so that the figure follows the theme.
  function resolve(value) {
    if (typeof value === "string") {
      const found = /^var\((--[\w-]+)\)$/.exec(value);
      if (!found) return value;
      const text = token(found[1]);
      return /^\d+px$/.test(text) ? parseInt(text, 10) : text;
    }
    if (Array.isArray(value)) return value.map(resolve);
    if (value && typeof value === "object") {
      for (const key of Object.keys(value)) value[key] = resolve(value[key]);
    }
    return value;
  }

  function withCommas(n) { return String(n).replace(/\B(?=(\d{3})+$)/g, ","); }

  function dataUri(url) {
    return fetch(url, { credentials: "same-origin" }).then((answer) => {
      if (!answer.ok) throw new Error("tile " + answer.status);
      return answer.blob();
    }).then((blob) => new Promise((done, fail) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = fail;
      reader.readAsDataURL(blob);
    }));
  }

  function start(box) {
    const plot = box.querySelector(".plot"), grid = box.querySelector(".cells"), read = box.querySelector(".read");
    const query = new URLSearchParams(window.location.search);
    const state = { steps: query.get("steps") || "", ranks: query.get("ranks") || "", meta: null, cells: null, cursor: null, asked: 0, drawn: false };
    const first = (box.dataset.first || "").split(".");
    const firstBad = first[0] !== "" ? { step: Number(first[0]), rank: first[1] !== "" && first[1] !== undefined ? Number(first[1]) : null } : null;

    function address() {
      const wanted = new URLSearchParams(box.dataset.query || "");
      if (state.steps) wanted.set("steps", state.steps);
      if (state.ranks) wanted.set("ranks", state.ranks);
      wanted.set("theme", theme());
      wanted.set("width", Math.max(200, Math.round(plot.clientWidth - parseInt(token("--gutter"), 10))));
      return box.dataset.stack + "?" + wanted;
    }

    function draw() {
      const number = ++state.asked;
      return fetch(address(), { credentials: "same-origin", headers: { Accept: "application/json" } })
        .then((answer) => { if (!answer.ok) throw new Error(String(answer.status)); return answer.json(); })
        .then((figure) => Promise.all(figure.data.map((trace) => trace.meta && trace.meta.tile
          ? dataUri(trace.meta.tile).then((uri) => { trace.source = uri; }) : null)).then(() => figure))
        .then((figure) => {
          if (number !== state.asked) return null;
          resolve(figure);
          state.meta = figure.layout.meta;
          plot.style.height = figure.layout.height + "px";
          const problem = box.querySelector(".problem");
          if (problem) problem.remove();
          return Plotly.react(plot, figure.data, figure.layout, CONFIG);
        })
        .then((drawn) => { if (drawn) { if (!state.drawn) listen(); state.drawn = true; place(); exact(); } })
        .catch(() => {
          if (number !== state.asked || box.querySelector(".problem")) return;
          const note = document.createElement("p");
          note.className = "problem";
          note.textContent = "Could not load, ";
          const retry = document.createElement("button");
          retry.type = "button"; retry.className = "plain"; retry.textContent = "retry";
          retry.addEventListener("click", () => { note.remove(); draw(); });
          note.append(retry);
          plot.before(note);
        });
    }

    // What stands over the figure: captions, the focusable grid, the readout, the frame of the overview.
    function place() {
      const meta = state.meta, rows = meta.rows, offset = plot.offsetTop;
      if (grid && rows.grid) {
        grid.style.top = offset + rows.grid[0] + "px";
        grid.style.height = rows.grid[1] + "px";
        read.style.top = offset + rows.grid[0] + rows.grid[1] + 20 + "px";
        const words = box.parentNode.querySelector("[data-window-words]");
        const ranks = meta.ranks[1] - meta.ranks[0] + 1;
        if (words) words.textContent = withCommas(ranks) + (ranks === 1 ? " rank" : " ranks") + " × steps " + withCommas(meta.steps[0]) + "–" + withCommas(meta.steps[1]) + " of attempt " + box.dataset.attempt;
      }
      for (const cap of box.querySelectorAll("[data-cap]")) {
        const row = rows[cap.dataset.cap];
        cap.hidden = !row;
        if (row) { cap.style.top = offset + row[0] - cap.offsetHeight - 4 + "px"; }
      }
      for (const inl of box.querySelectorAll("[data-inl]")) {
        const row = rows[inl.dataset.inl];
        inl.hidden = !row;
        if (row) { inl.style.top = offset + row[0] - 17 + "px"; inl.querySelector("span").textContent = meta.captions[inl.dataset.inl] || ""; }
      }
      if (!grid && meta.captions) {
        for (const old of box.querySelectorAll(".inl")) old.remove();
        for (const name of Object.keys(meta.captions)) {
          const inl = document.createElement("span");
          inl.className = "inl";
          inl.textContent = meta.captions[name];
          inl.style.top = offset + rows[name][0] - 17 + "px";
          box.append(inl);
        }
        const absent = box.querySelector("[data-absent]");
        if (absent) absent.textContent = meta.absent.length ? "Not measured in this range: " + meta.absent.join(", ").toLowerCase() + "." : "";
      }
      const over = box.querySelector("[data-over]");
      if (over && meta.overview) {
        const image = over.querySelector("img"), frame = over.querySelector("[data-over-window]");
        if (image.getAttribute("src") !== meta.overview) image.src = meta.overview;
        const low = meta.extent[0], wide = meta.extent[1] - low + 1;
        const left = Math.max(0, (meta.steps[0] - low) / wide), right = Math.min(1, (meta.steps[1] + 1 - low) / wide);
        frame.style.left = Math.min(left * 100, 99) + "%";
        frame.style.width = Math.max(0.5, (right - left) * 100) + "%";
      }
    }

    function remember() {
      const url = new URL(window.location.href);
      for (const name of ["steps", "ranks"]) if (state[name]) url.searchParams.set(name, state[name]); else url.searchParams.delete(name);
      history.replaceState(null, "", url);
    }

    function view(steps, ranks) {
      state.steps = steps; state.ranks = ranks;
      remember();
      return draw();
    }

    function clampSteps(a, b) {
      a = Math.max(0, Math.round(a)); b = Math.round(b);
      return a + "-" + Math.max(a, b);
    }

    function zoom(factor, about) {
      const [a, b] = state.meta.steps, middle = about === undefined ? (a + b) / 2 : about, half = (b - a + 1) / 2 * factor;
      view(clampSteps(middle - half, middle + half - 1), state.ranks);
    }

    function all() {
      const [a, b] = state.meta.extent;
      view(clampSteps(a, b), "");
    }

    function toFirst() {
      if (box.dataset.opening) {
        view("", "").then(() => { if (firstBad) { setCursor(firstBad.step, firstBad.rank || 0); } });
      }
    }

    function listen() {
      let waiting = 0;
      plot.on("plotly_relayout", (change) => {
        const x0 = change["xaxis.range[0]"], x1 = change["xaxis.range[1]"];
        const gridAxis = "yaxis2";
        const y0 = change[gridAxis + ".range[0]"], y1 = change[gridAxis + ".range[1]"];
        if (x0 === undefined && y0 === undefined) return;
        clearTimeout(waiting);
        waiting = setTimeout(() => {
          let ranks = state.ranks;
          if (y0 !== undefined && state.meta.ranks) {
            const low = Math.max(0, Math.ceil(Math.min(y0, y1))), high = Math.max(low, Math.floor(Math.max(y0, y1)));
            ranks = low + "-" + high;
          }
          const steps = x0 === undefined ? state.steps || state.meta.steps.join("-") : clampSteps(Math.min(x0, x1) + 0.5, Math.max(x0, x1) - 0.5);
          view(steps, ranks);
        }, 60);
      });
      plot.on("plotly_doubleclick", () => view("", ""));
      if (!grid) return;
      plot.addEventListener("mousemove", (event) => { const cell = cellAt(event); if (cell) show(cell.step, cell.rank, false); });
      plot.addEventListener("mouseleave", () => { if (document.activeElement !== grid) rest(); });
      plot.addEventListener("click", (event) => { const cell = cellAt(event); if (cell) pin(cell.step, cell.rank); });
    }

    function cellAt(event) {
      const meta = state.meta, box_ = grid.getBoundingClientRect();
      const x = (event.clientX - box_.left) / box_.width, y = (event.clientY - box_.top) / box_.height;
      if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
      return {
        step: meta.steps[0] + Math.floor(x * (meta.steps[1] - meta.steps[0] + 1)),
        rank: meta.ranks[0] + Math.floor(y * (meta.ranks[1] - meta.ranks[0] + 1)),
      };
    }

    // Exact cells

    function exact() {
      if (!box.dataset.cells) return;
      const wanted = new URLSearchParams({ steps: state.meta.steps.join("-"), ranks: state.meta.ranks.join("-") });
      fetch(box.dataset.cells + "?" + wanted, { credentials: "same-origin" })
        .then((answer) => answer.json())
        .then((cells) => {
          state.cells = cells;
          legend(cells.counts);
          if (!state.cursor && firstBad) { state.cursor = { step: firstBad.step, rank: firstBad.rank || 0 }; }
          rest();
        })
        .catch(() => { state.cells = null; });
    }

    function legend(counts) {
      for (const item of box.parentNode.querySelectorAll("[data-legend] li")) {
        const number = counts[item.dataset.state] || 0, word = item.dataset.state;
        item.classList.toggle("none", !number);
        item.querySelector("b").textContent = word === "healthy" || word === "held" ? "" : withCommas(number);
      }
    }

    function stateOf(step, rank) {
      const cells = state.cells;
      if (!cells) return "";
      if (!cells.runs) return cells.says;
      const hit = cells.runs.find((r) => step >= r[0] && step <= r[1] && rank >= r[2] && rank <= r[3]);
      if (hit) return cells.words[hit[4]];
      return step > state.meta.extent[1] ? "no value: the attempt has no such step" : "healthy or not posted";
    }

    function nodeOf(rank) {
      for (const [name, pieces, lowest] of (state.cells && state.cells.nodes) || []) {
        for (const piece of pieces) {
          const [low, high] = piece.split("–").map(Number);
          if (rank >= low && rank <= (high === undefined ? low : high)) return " on " + name + (pieces.length === 1 ? ", GPU " + (rank - lowest) : "");
        }
      }
      return "";
    }

    let asking = 0;
    function show(step, rank, mark) {
      const strong = document.createElement("b");
      strong.textContent = "step " + withCommas(step) + ", rank " + rank;
      const word = document.createElement("b");
      word.textContent = stateOf(step, rank);
      let tail = "";
      if (firstBad && step === firstBad.step && rank === firstBad.rank) {
        tail = " in " + box.dataset.phase + (box.dataset.layer ? " at " + box.dataset.layer : "");
      }
      read.replaceChildren(strong, nodeOf(rank) + ": ", word, tail);
      if (mark) cross(step, rank);
      clearTimeout(asking);
      asking = setTimeout(() => {
        fetch(box.dataset.cell + "?step=" + step + "&rank=" + rank, { credentials: "same-origin" })
          .then((answer) => answer.json()).then((values) => { if (read.contains(strong)) read.append("; " + values.says); }).catch(() => {});
      }, 150);
    }

    function cross(step, rank) {
      const meta = state.meta, mark = grid.querySelector(".cross");
      const wide = grid.clientWidth / (meta.steps[1] - meta.steps[0] + 1), tall = grid.clientHeight / (meta.ranks[1] - meta.ranks[0] + 1);
      const inside = step >= meta.steps[0] && step <= meta.steps[1] && rank >= meta.ranks[0] && rank <= meta.ranks[1];
      mark.style.display = inside ? "block" : "none";
      mark.style.left = (step - meta.steps[0]) * wide - 1 + "px";
      mark.style.top = (rank - meta.ranks[0]) * tall - 1 + "px";
      mark.style.width = Math.max(4, wide + 2) + "px";
      mark.style.height = Math.max(4, tall + 2) + "px";
    }

    function rest() {
      if (state.cursor) show(state.cursor.step, state.cursor.rank, document.activeElement === grid);
    }

    function setCursor(step, rank) {
      const meta = state.meta;
      state.cursor = {
        step: Math.max(meta.steps[0], Math.min(meta.steps[1], step)),
        rank: Math.max(meta.ranks[0], Math.min(meta.ranks[1], rank)),
      };
      show(state.cursor.step, state.cursor.rank, true);
    }

    function pin(step, rank) {
      setCursor(step, rank);
      const url = new URL(window.location.href);
      url.searchParams.set("cell", step + "." + rank);
      history.replaceState(null, "", url);
    }

    function nextBad(by) {
      const runs = state.cells && state.cells.runs;
      if (!runs || !state.cursor) return;
      const order = runs.filter((r) => r[4] !== 2 && r[4] !== 3).map((r) => [r[0], r[2]]).sort((p, q) => p[0] - q[0] || p[1] - q[1]);
      const { step, rank } = state.cursor;
      const later = order.filter((c) => c[0] > step || (c[0] === step && c[1] > rank));
      const earlier = order.filter((c) => c[0] < step || (c[0] === step && c[1] < rank));
      const target = by > 0 ? later[0] : earlier[earlier.length - 1];
      if (target) setCursor(target[0], target[1]);
    }

    if (grid) {
      grid.addEventListener("focus", () => { if (state.meta) { if (!state.cursor) state.cursor = { step: state.meta.steps[0], rank: state.meta.ranks[0] }; cross(state.cursor.step, state.cursor.rank); } });
      grid.addEventListener("blur", () => { grid.querySelector(".cross").style.display = "none"; });
      grid.addEventListener("keydown", (event) => {
        if (!state.meta || !state.cursor || event.ctrlKey || event.metaKey || event.altKey) return;
        const by = event.shiftKey ? 10 : 1, { step, rank } = state.cursor, key = event.key;
        if (key === "ArrowLeft") setCursor(step - by, rank);
        else if (key === "ArrowRight") setCursor(step + by, rank);
        else if (key === "ArrowUp") setCursor(step, rank - by);
        else if (key === "ArrowDown") setCursor(step, rank + by);
        else if (key === "Home") setCursor(state.meta.steps[0], rank);
        else if (key === "End") setCursor(state.meta.steps[1], rank);
        else if (key === "f") toFirst();
        else if (key === "n") nextBad(1);
        else if (key === "N") nextBad(-1);
        else if (key === "+" || key === "=") zoom(0.5, step);
        else if (key === "-" || key === "\u2212") zoom(2, step);
        else if (key === "0") view("", "");
        else if (key === "Enter") pin(step, rank);
        else if (key === "Escape") grid.blur();
        else return;
        event.preventDefault();
        event.stopPropagation();
      });
      document.addEventListener("andon:first-bad", () => { toFirst(); grid.focus({ preventScroll: true }); });
      for (const button of document.querySelectorAll("[data-zoom]")) {
        button.addEventListener("click", () => { if (button.dataset.zoom === "all") all(); else toFirst(); });
      }
      const cell = /^(\d{1,18})\.(\d{1,8})$/.exec(query.get("cell") || "");
      if (cell) state.cursor = { step: Number(cell[1]), rank: Number(cell[2]) };
    }

    const over = box.querySelector("[data-over]");
    if (over) {
      let from = null;
      over.addEventListener("pointerdown", (event) => { from = event.clientX; over.setPointerCapture(event.pointerId); });
      over.addEventListener("pointerup", (event) => {
        if (from === null || !state.meta) return;
        const meta = state.meta, size = over.getBoundingClientRect(), wide = meta.extent[1] - meta.extent[0] + 1;
        const span = meta.steps[1] - meta.steps[0];
        const moved = event.clientX - from;
        // A press jumps there, a drag moves the frame by as much.
        const centre = Math.abs(moved) < 4
          ? meta.extent[0] + (event.clientX - size.left) / size.width * wide
          : (meta.steps[0] + meta.steps[1]) / 2 + moved / size.width * wide;
        from = null;
        view(clampSteps(Math.max(meta.extent[0], centre - span / 2), Math.max(meta.extent[0] + span, centre + span / 2)), state.ranks);
      });
    }

    draw();
    let wide = plot.clientWidth, resized = 0;
    window.addEventListener("resize", () => {
      if (plot.clientWidth === wide) return;
      wide = plot.clientWidth;
      clearTimeout(resized);
      resized = setTimeout(draw, 150);
    });
    return { draw };
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => stacks.forEach((stack) => stack.draw()));
})();
