"use strict";
// The cells of the first-failure grid: which one is under the pointer, what is known of it, and the keys.
// A row is a rank, in the order the server gave; the address names ranks, whatever stands in which row.
window.andonCells = function (stack) {
  const { box, plot, state } = stack;
  const grid = box.querySelector(".cells"), read = box.querySelector(".read"), mark = grid.querySelector(".cross");
  const first = (box.dataset.first || "").split(".");
  const firstBad = first[0] !== "" ? { step: Number(first[0]), rank: first[1] ? Number(first[1]) : null } : null;
  let exact = null, cursor = null, pinned = false, ranks = null, rows = null, asking = 0, number = 0;

  function withCommas(n) { return String(n).replace(/\B(?=(\d{3})+$)/g, ","); }

  // Where a rank stands, and who stands where.
  function learnOrder(pieces) {
    if (!pieces) { ranks = rows = null; return; }
    ranks = []; rows = new Map();
    for (const [low, many] of pieces) for (let n = 0; n < many; n++) { rows.set(low + n, ranks.length); ranks.push(low + n); }
  }
  function rankOf(row) { return ranks ? (row < ranks.length ? ranks[row] : row) : row; }
  function rowOf(rank) { return ranks ? (rows.has(rank) ? rows.get(rank) : rank) : rank; }

  function cellAt(event) {
    const meta = state.meta, size = grid.getBoundingClientRect();
    const x = (event.clientX - size.left) / size.width, y = (event.clientY - size.top) / size.height;
    if (!meta || x < 0 || x >= 1 || y < 0 || y >= 1) return null;
    return { step: stack.stepAt(x), rank: rankOf(meta.ranks[0] + Math.floor(y * (meta.ranks[1] - meta.ranks[0] + 1))) };
  }

  function load() {
    const meta = state.meta, mine = ++number;
    learnOrder(meta.order.pieces);
    const wanted = new URLSearchParams({ steps: meta.steps.join("-"), ranks: meta.ranks.join("-"), rows: meta.order.rows, sort: meta.order.sort });
    return fetch(box.dataset.cells + "?" + wanted, { credentials: "same-origin" })
      .then((answer) => { if (!answer.ok) throw new Error(String(answer.status)); return answer.json(); })
      .then((cells) => {
        if (mine !== number) return;
        exact = cells;
        legend(cells.counts, Boolean(cells.says) && !cells.runs);
        // A rank that is not known is not shown as rank 0: the readout keeps the headline.
        if (!cursor && firstBad && firstBad.rank !== null) cursor = { step: firstBad.step, rank: firstBad.rank };
        rest();
      })
      .catch(() => { if (mine === number) exact = null; });
  }

  function legend(counts, unknown) {
    for (const item of box.parentNode.querySelectorAll("[data-legend] li")) {
      const many = counts[item.dataset.state] || 0, word = item.dataset.state, plain = ["healthy", "held", "not posted"].includes(word);
      // A reduced value is no rank's: it has no cell, and is counted all the same.
      const wide = !many && word === box.dataset.runWide;
      item.classList.toggle("none", !plain && !wide && !many && !(unknown && !Object.keys(counts).length));
      item.querySelector("b").textContent = plain ? "" : wide ? "of the whole run" : unknown && !Object.keys(counts).length ? "?" : withCommas(many);
    }
  }

  function stateOf(step, rank) {
    if (!exact) return "";
    if (!exact.runs) return firstBad && step === firstBad.step && rank === firstBad.rank ? "nonfinite" : exact.says;
    const row = rowOf(rank);
    const hit = exact.runs.find((r) => step >= r[0] && step <= r[1] && row >= r[2] && row <= r[3]);
    if (hit) return exact.words[hit[4]];
    // What is bad is a value of the whole run: no cell has it, and the one that is named is not well for that.
    if (box.dataset.runWide && firstBad && step === firstBad.step) return box.dataset.runWide + ", a value of the whole run,";
    return step > state.meta.extent[1] ? "no value: the attempt has no such step" : "nothing bad";
  }

  function nodeOf(rank) {
    for (const [name, pieces, lowest] of (exact && exact.nodes) || []) {
      for (const piece of pieces) {
        const [low, high] = piece.split("–").map(Number);
        if (rank >= low && rank <= (high === undefined ? low : high)) return " on " + name + (pieces.length === 1 ? ", GPU " + (rank - lowest) : "");
      }
    }
    return "";
  }

  function show(step, rank, marked) {
    const strong = document.createElement("b"), word = document.createElement("b");
    strong.textContent = "step " + withCommas(step) + ", rank " + rank;
    word.textContent = stateOf(step, rank);
    let tail = "";
    if (firstBad && step === firstBad.step && rank === firstBad.rank) {
      tail = " in " + box.dataset.phase + (box.dataset.layer ? " at " + box.dataset.layer : "");
    }
    read.replaceChildren(strong, nodeOf(rank) + ": ", word, tail);
    if (marked) cross(step, rank);
    clearTimeout(asking);
    asking = setTimeout(() => {
      fetch(box.dataset.cell + "?step=" + step + "&rank=" + rank, { credentials: "same-origin" })
        .then((answer) => answer.json())
        .then((values) => { if (read.contains(strong)) { read.append("; " + values.says); } })
        .catch(() => {});
    }, 150);
  }

  function cross(step, rank) {
    const meta = state.meta, row = rowOf(rank), tall = grid.clientHeight / (meta.ranks[1] - meta.ranks[0] + 1);
    const [left, right] = stack.placeOf(step).map((share) => share * grid.clientWidth);
    const inside = step >= meta.steps[0] && step <= meta.steps[1] && row >= meta.ranks[0] && row <= meta.ranks[1];
    mark.style.display = inside ? "block" : "none";
    mark.style.left = left - 1 + "px";
    mark.style.top = (row - meta.ranks[0]) * tall - 1 + "px";
    mark.style.width = Math.max(4, right - left + 2) + "px";
    mark.style.height = Math.max(4, tall + 2) + "px";
  }

  function rest() { if (cursor) show(cursor.step, cursor.rank, pinned || document.activeElement === grid); }

  function move(step, rank) {
    const meta = state.meta;
    const row = Math.max(meta.ranks[0], Math.min(meta.ranks[1], rowOf(rank)));
    cursor = { step: Math.max(meta.steps[0], Math.min(meta.steps[1], step)), rank: rankOf(row) };
    show(cursor.step, cursor.rank, true);
  }

  function moveRow(by) {
    const meta = state.meta, row = Math.max(meta.ranks[0], Math.min(meta.ranks[1], rowOf(cursor.rank) + by));
    move(cursor.step, rankOf(row));
  }

  function pin(step, rank) {
    pinned = true;
    move(step, rank);
    const url = new URL(window.location.href);
    url.searchParams.set("cell", step + "." + rank);
    history.replaceState(null, "", url);
  }

  function nextBad(by) {
    if (!exact || !exact.runs || !cursor) return;
    const bad = exact.runs.filter((r) => r[4] !== 2 && r[4] !== 3).map((r) => [r[0], r[2]]);
    bad.sort((p, q) => p[0] - q[0] || p[1] - q[1]);
    const here = [cursor.step, rowOf(cursor.rank)];
    const later = (c) => c[0] > here[0] || (c[0] === here[0] && c[1] > here[1]);
    const earlier = (c) => c[0] < here[0] || (c[0] === here[0] && c[1] < here[1]);
    const target = by > 0 ? bad.find(later) : bad.filter(earlier).pop();
    if (target) move(target[0], rankOf(target[1]));
  }

  function toFirst() {
    // There at once, so that what is pressed while the view loads goes on from there.
    if (firstBad) cursor = { step: firstBad.step, rank: firstBad.rank || 0 };
    stack.view({ steps: "", ranks: "" }).then(() => { if (firstBad) move(cursor.step, cursor.rank); });
  }

  // Where the keys begin when no cell was named.
  function start() {
    const meta = state.meta, step = firstBad ? firstBad.step : meta.steps[0];
    cursor = { step: Math.max(meta.steps[0], Math.min(meta.steps[1], step)), rank: rankOf(meta.ranks[0]) };
  }

  const KEYS = {
    ArrowLeft: (by) => move(cursor.step - by, cursor.rank),
    ArrowRight: (by) => move(cursor.step + by, cursor.rank),
    ArrowUp: (by) => moveRow(-by),
    ArrowDown: (by) => moveRow(by),
    Home: () => move(state.meta.steps[0], cursor.rank),
    End: () => move(state.meta.steps[1], cursor.rank),
    f: toFirst,
    n: () => nextBad(1),
    N: () => nextBad(-1),
    s: () => stack.sort(),
    "+": () => stack.zoom(0.5, cursor.step),
    "=": () => stack.zoom(0.5, cursor.step),
    "-": () => stack.zoom(2, cursor.step),
    "\u2212": () => stack.zoom(2, cursor.step),
    0: () => stack.view({ steps: "", ranks: "" }),
    Enter: () => pin(cursor.step, cursor.rank),
    Escape: () => { pinned = false; grid.blur(); },
  };
  grid.addEventListener("keydown", (event) => {
    if (!state.meta || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    if (!cursor) start();
    KEYS[event.key](event.shiftKey ? 10 : 1);
    event.preventDefault();
    event.stopPropagation();
  });
  grid.addEventListener("focus", () => {
    if (!state.meta) return;
    if (!cursor) start();
    cross(cursor.step, cursor.rank);
  });
  grid.addEventListener("blur", () => { if (!pinned) mark.style.display = "none"; });
  document.addEventListener("andon:first-bad", () => { toFirst(); grid.focus({ preventScroll: true }); });
  const asked = /^(\d{1,18})\.(\d{1,8})$/.exec(new URLSearchParams(window.location.search).get("cell") || "");
  if (asked) { cursor = { step: Number(asked[1]), rank: Number(asked[2]) }; pinned = true; }

  return {
    load,
    toFirst,
    listen() {
      plot.addEventListener("mousemove", (event) => { const cell = cellAt(event); if (cell) show(cell.step, cell.rank, false); });
      plot.addEventListener("mouseleave", () => { if (document.activeElement !== grid) rest(); });
      plot.addEventListener("click", (event) => { const cell = cellAt(event); if (cell) pin(cell.step, cell.rank); });
    },
    place(top, height) {
      grid.style.top = top + "px";
      grid.style.height = height + "px";
      read.style.top = top + height + 20 + "px";
      const words = box.parentNode.querySelector("[data-window-words]"), meta = state.meta;
      const many = meta.ranks[1] - meta.ranks[0] + 1;
      if (words) words.textContent = withCommas(many) + (many === 1 ? " rank" : " ranks") + " × steps " + withCommas(meta.steps[0]) + "–" + withCommas(meta.steps[1]) + " of attempt " + box.dataset.attempt;
    },
  };
};
