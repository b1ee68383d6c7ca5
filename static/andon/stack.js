"use strict";
// The stack of grid, layers and curves: one Plotly figure made on the server, with its tiles put in here and
// an overview that can be dragged. The whole view is in the page's address. The grid's cells: cells.js.
(function () {
  const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, scrollZoom: false, showTips: false };
  const VIEW = ["steps", "ranks", "rows", "sort", "x", "layers", "replica"], MANY = ["line"];
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

  // One colour of hatch says that a tile did not come; the list below still holds the cells.
  function hatch() {
    const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
    canvas.width = canvas.height = 64;
    pen.strokeStyle = token("--line2");
    for (let at = -64; at < 64; at += 8) { pen.moveTo(at, 64); pen.lineTo(at + 64, 0); }
    pen.stroke();
    return canvas.toDataURL("image/png");
  }

  function start(box) {
    const plot = box.querySelector(".plot"), query = new URLSearchParams(window.location.search);
    const state = { meta: null, asked: 0, drawn: false };
    for (const name of VIEW) state[name] = query.get(name) || "";
    for (const name of MANY) state[name] = query.getAll(name);

    // The view as it stands in the page's address, and in that of the figure.
    function addView(query) {
      for (const name of VIEW) if (state[name]) query.set(name, state[name]);
      for (const name of MANY) for (const one of state[name]) query.append(name, one);
    }

    function address() {
      const wanted = new URLSearchParams(box.dataset.query || "");
      addView(wanted);
      wanted.set("theme", theme());
      wanted.set("width", Math.max(200, Math.round(plot.clientWidth - parseInt(token("--gutter"), 10))));
      return box.dataset.stack + "?" + wanted;
    }

    function draw() {
      const number = ++state.asked;
      let lost = false;
      return fetch(address(), { credentials: "same-origin", headers: { Accept: "application/json" } })
        .then((answer) => { if (!answer.ok) throw new Error(String(answer.status)); state.etag = answer.headers.get("ETag"); return answer.json(); })
        .then((figure) => Promise.all(figure.data.map((trace) => trace.meta && trace.meta.tile
          ? dataUri(trace.meta.tile).then((uri) => { trace.source = uri; }, () => { lost = true; trace.source = hatch(); shrink(trace); }) : null)).then(() => figure))
        .then((figure) => {
          if (number !== state.asked) return null;
          resolve(figure);
          state.meta = figure.layout.meta;
          plot.style.height = figure.layout.height + "px";
          const problem = box.querySelector(".problem");
          if (problem) problem.remove();
          return Plotly.react(plot, figure.data, figure.layout, CONFIG);
        })
        .then((drawn) => {
          if (!drawn) return;
          if (!state.drawn) listen();
          state.drawn = true;
          place();
          if (lost) complain("A tile could not be loaded, ");
          if (cells) cells.load();
        })
        .catch(() => { if (number === state.asked) complain("Could not load, "); });
    }

    // The hatch has fewer pixels than the tile it stands for.
    function shrink(trace) {
      const wide = trace.dx * trace.meta.size[0], tall = trace.dy * trace.meta.size[1];
      trace.x0 += (wide / 64 - trace.dx) / 2; trace.y0 += (tall / 64 - trace.dy) / 2;
      trace.dx = wide / 64; trace.dy = tall / 64;
    }

    function complain(words) {
      if (box.querySelector(".problem")) return;
      const note = document.createElement("p"), retry = document.createElement("button");
      note.className = "problem";
      note.textContent = words;
      retry.type = "button"; retry.className = "plain"; retry.textContent = "retry";
      retry.addEventListener("click", () => { note.remove(); draw(); });
      note.append(retry);
      plot.before(note);
    }

    // What stands over the figure: captions, the focusable grid, the readout, the frame of the overview.
    function place() {
      const meta = state.meta, rows = meta.rows, offset = plot.offsetTop;
      if (cells && rows.grid) cells.place(offset + rows.grid[0], rows.grid[1]);
      if (layers) layers.place(offset);
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
      if (!cells && meta.captions) {
        for (const old of box.querySelectorAll(".inl")) old.remove();
        for (const name of Object.keys(meta.captions)) {
          const inl = document.createElement("span");
          inl.className = "inl";
          inl.textContent = meta.captions[name];
          inl.style.top = offset + rows[name][0] - 17 + "px";
          box.append(inl);
        }
        const column = box.querySelector("[data-column]");
        if (column) column.textContent = meta.column > 1 ? "Every pixel shows least and greatest value of " + meta.column.toLocaleString("en-US") + " steps, at their own steps." : "";
        tell(meta.text);
        const absent = box.querySelector("[data-absent]");
        if (absent) absent.textContent = meta.absent.length ? "Not measured in this range: " + meta.absent.join(", ") + "." : "";
      }
      if (over && meta.overview) {
        const image = over.querySelector("img");
        if (image.getAttribute("src") !== meta.overview) image.src = meta.overview;
        frame(meta.steps[0], meta.steps[1]);
      }
      for (const choice of box.parentNode.querySelectorAll("[data-view]")) {
        const shown = choice.dataset.view === "rows" ? meta.order && meta.order.rows : state[choice.dataset.view];
        if (choice.tagName === "SELECT") choice.value = shown;
        else choice.setAttribute("aria-pressed", String(shown === choice.dataset.value));
      }
    }

    // The figure as a table, for who does not see it.
    function tell(rows) {
      const details = box.parentNode.querySelector("[data-text-of]");
      if (!details || !rows) return;
      const heads = Array.from(details.querySelectorAll("th")).map((head) => head.textContent.toLowerCase());
      details.querySelector("tbody").replaceChildren(...rows.map((cells) => {
        const row = document.createElement("tr");
        row.append(...cells.map((text, at) => {
          const cell = document.createElement("td");
          if (at) cell.dataset.h = heads[at];
          cell.textContent = text;
          return cell;
        }));
        return row;
      }));
      details.hidden = !rows.length;
    }

    // Time or steps: where a step lies in the picture, and which step lies there.
    function stepAt(share) {
      const meta = state.meta, [a, b] = meta.steps, clock = meta.clock;
      if (!clock) return a + Math.min(b - a, Math.floor(share * (b - a + 1)));
      const at = clock.begin + share * (clock.end - clock.begin);
      let n = 0;
      while (n < clock.t.length - 2 && clock.t[n + 1] <= at) n++;
      const within = (at - clock.t[n]) / (clock.t[n + 1] - clock.t[n] || 1);
      return Math.min(clock.s[n + 1] - 1, Math.floor(clock.s[n] + within * (clock.s[n + 1] - clock.s[n])));
    }

    function timeOf(edge) {
      const { s, t } = state.meta.clock;
      let n = 0;
      while (n < s.length - 2 && s[n + 1] <= edge) n++;
      return t[n] + (edge - s[n]) / (s[n + 1] - s[n]) * (t[n + 1] - t[n]);
    }

    function placeOf(step) {
      const meta = state.meta, [a, b] = meta.steps, clock = meta.clock;
      if (!clock) return [(step - a) / (b - a + 1), (step + 1 - a) / (b - a + 1)];
      const begin = clock.begin, wide = clock.end - begin;
      return [(timeOf(step) - begin) / wide, (timeOf(step + 1) - begin) / wide];
    }

    function view(wanted) {
      Object.assign(state, wanted);
      const url = new URL(window.location.href);
      for (const name of [...VIEW, ...MANY]) url.searchParams.delete(name);
      addView(url.searchParams);
      history.replaceState(null, "", url);
      return draw();
    }

    function between(a, b) {
      a = Math.max(0, Math.round(a)); b = Math.round(b);
      return a + "-" + Math.max(a, b);
    }

    function zoom(factor, about) {
      const [a, b] = state.meta.steps, middle = about === undefined ? (a + b) / 2 : about, half = (b - a + 1) / 2 * factor;
      return view({ steps: between(middle - half, middle + half - 1) });
    }

    // What a drag does, for the keyboard: no further than there are steps.
    function pan(share) {
      const [a, b] = state.meta.steps, [low, high] = state.meta.extent, wide = b - a;
      const from = Math.max(low, Math.min(high - wide, a + share * (wide + 1)));
      return view({ steps: between(from, from + wide) });
    }

    const stack = { box, plot, state, stepAt, placeOf, view, zoom, sort: () => view({ sort: state.sort === "failure" ? "" : "failure", ranks: "" }) };
    const cells = box.dataset.cells && window.andonCells ? window.andonCells(stack) : null;
    const layers = cells && window.andonLayers ? window.andonLayers(stack) : null;

    function listen() {
      let waiting = 0;
      plot.on("plotly_relayout", (change) => {
        const x0 = change["xaxis.range[0]"], x1 = change["xaxis.range[1]"];
        const y0 = change["yaxis2.range[0]"], y1 = change["yaxis2.range[1]"];
        if (x0 === undefined && y0 === undefined) return;
        clearTimeout(waiting);
        waiting = setTimeout(() => {
          const wanted = {}, meta = state.meta;
          if (y0 !== undefined && meta.ranks) {
            const low = Math.max(0, Math.ceil(Math.min(y0, y1))), high = Math.max(low, Math.floor(Math.max(y0, y1)));
            wanted.ranks = low + "-" + high;
          }
          if (x0 === undefined) wanted.steps = state.steps || meta.steps.join("-");
          else if (meta.clock) {
            const { begin, end } = meta.clock, share = (x) => Math.max(0, Math.min(0.999999, (x - begin) / (end - begin)));
            wanted.steps = stepAt(share(Math.min(x0, x1))) + "-" + stepAt(share(Math.max(x0, x1)));
          } else wanted.steps = between(Math.min(x0, x1) + 0.5, Math.max(x0, x1) - 0.5);
          view(wanted);
        }, 60);
      });
      plot.on("plotly_doubleclick", () => view({ steps: "", ranks: "" }));
      if (cells) cells.listen();
      if (layers) layers.listen();
    }

    for (const button of box.parentNode.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => {
        const how = button.dataset.zoom;
        if (how === "first") { if (cells) cells.toFirst(); return; }
        if (!state.meta) return;
        if (how === "all") view({ steps: state.meta.extent.join("-"), ranks: "" });
        else if (how === "in") zoom(0.25);
        else if (how === "out") zoom(4);
        else pan(how === "earlier" ? -0.5 : 0.5);
      });
    }
    for (const choice of box.parentNode.querySelectorAll("[data-view]")) {
      const name = choice.dataset.view;
      if (choice.tagName === "SELECT") choice.addEventListener("change", () => view({ [name]: choice.value, ...(name === "rows" ? { ranks: "" } : {}) }));
      else choice.addEventListener("click", () => view({ [name]: state[name] === choice.dataset.value ? "" : choice.dataset.value, ...(name === "sort" ? { ranks: "" } : {}) }));
    }

    const over = box.querySelector("[data-over]");
    // The frame may be dragged beyond neither end; a press beside it jumps there.
    function frame(first, last) {
      const low = state.meta.extent[0], wide = state.meta.extent[1] - low + 1, shown = over.querySelector("[data-over-window]");
      const left = Math.max(0, (first - low) / wide), right = Math.min(1, (last + 1 - low) / wide);
      shown.style.left = Math.min(left * 100, 99) + "%";
      shown.style.width = Math.max(0.5, (right - left) * 100) + "%";
    }

    if (over) {
      let from = null;
      const moved = (event) => {
        const meta = state.meta, size = over.getBoundingClientRect(), wide = meta.extent[1] - meta.extent[0] + 1;
        const span = meta.steps[1] - meta.steps[0], by = event.clientX - from;
        const centre = Math.abs(by) < 4
          ? meta.extent[0] + (event.clientX - size.left) / size.width * wide
          : (meta.steps[0] + meta.steps[1]) / 2 + by / size.width * wide;
        const low = Math.max(meta.extent[0], Math.min(Math.max(meta.extent[0], meta.extent[1] - span), centre - span / 2));
        return [low, low + span];
      };
      over.addEventListener("pointerdown", (event) => { if (state.meta) { from = event.clientX; over.setPointerCapture(event.pointerId); } });
      over.addEventListener("pointermove", (event) => { if (from !== null && Math.abs(event.clientX - from) >= 4) frame(...moved(event)); });
      over.addEventListener("pointercancel", () => { from = null; frame(...state.meta.steps); });
      over.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const [a, b] = moved(event);
        from = null;
        view({ steps: between(a, b) });
      });
    }

    // The right edge: asked every 5 s while the page is seen, drawn again only when a cell changed.
    let pressed = false;
    document.addEventListener("pointerdown", () => { pressed = true; });
    document.addEventListener("pointerup", () => { pressed = false; });
    if ("follow" in box.dataset) setInterval(() => {
      if (!state.etag || document.hidden || pressed) return;
      fetch(address(), { method: "HEAD", credentials: "same-origin", headers: { "If-None-Match": state.etag } })
        .then((answer) => { if (answer.status === 200 && !pressed) draw(); })
        .catch(() => {});
    }, 5000);

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
