"use strict";
// Single keys: they move and open, and never request, approve, waive or delete.
(function () {
  const dialog = document.getElementById("keys");
  if (!dialog) return;
  const off = document.getElementById("keys-off");
  off.checked = localStorage.getItem("andon-keys") === "off";
  off.addEventListener("change", () => localStorage.setItem("andon-keys", off.checked ? "off" : "on"));
  for (const button of document.querySelectorAll("[data-keys]")) button.addEventListener("click", () => dialog.showModal());

  let going = 0, row = -1;
  const SECTIONS = { f: "grid", e: "evidence", t: "timeline", p: "plan" };

  function rows() { return Array.from(document.querySelectorAll("[data-rows] tbody tr, ul[data-rows] li")); }

  function move(by) {
    const all = rows();
    if (!all.length) return section(by);
    row = Math.max(0, Math.min(all.length - 1, row + by));
    all.forEach((item, index) => item.setAttribute("aria-current", String(index === row)));
    const link = all[row].querySelector("[data-open]") || all[row].querySelector("a");
    if (link) link.focus();
    all[row].scrollIntoView({ block: "nearest" });
  }

  function section(by) {
    const all = Array.from(document.querySelectorAll(".bar > a[href^='#']")).map((a) => document.getElementById(a.hash.slice(1))).filter((s) => s && s.offsetParent);
    if (!all.length) return;
    const tops = all.map((s) => s.getBoundingClientRect().top - 46);
    const next = by > 0 ? tops.findIndex((top) => top > 2) : tops.length - 1 - tops.slice().reverse().findIndex((top) => top < -2);
    const target = all[next < 0 || next >= all.length ? (by > 0 ? all.length - 1 : 0) : next];
    show(target);
  }

  function show(target) {
    if (!target) return false;
    target.scrollIntoView({ block: "start" });
    if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
    target.focus({ preventScroll: true });
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (off.checked || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const at = event.target;
    if (at.matches && at.matches("input, textarea, select, [contenteditable]")) return;
    const key = event.key, inGrid = at.closest && at.closest("[role=application]");
    if (going && Date.now() - going < 1500) {
      going = 0;
      const link = document.querySelector("nav [data-go='" + CSS.escape(key) + "']");
      if (link) { event.preventDefault(); window.location.href = link.href; return; }
    }
    let done = true;
    if (key === "?") dialog.showModal();
    else if (key === "/") {
      const find = document.getElementById("find");
      if (find && find.offsetParent) find.focus(); else window.location.href = "/search";
    } else if (key === "g") going = Date.now();
    else if (inGrid) done = false;
    else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "]") section(1);
    else if (key === "[") section(-1);
    else if (/^[1-6]$/.test(key) && document.querySelectorAll("[data-chip]")[key - 1]) window.location.href = document.querySelectorAll("[data-chip]")[key - 1].href;
    else if (!document.getElementById("answers")) done = false;
    else if (key === "a") { const button = Array.from(document.querySelectorAll("[data-acknowledge]")).find((b) => b.offsetParent); if (button) button.click(); else done = false; }
    else if (key === "f") { show(document.getElementById("grid")); document.dispatchEvent(new CustomEvent("andon:first-bad")); }
    else if (key === "m") { const note = document.getElementById("note-text"); if (note) { note.closest("details").open = true; show(document.getElementById("notes")); note.focus(); } }
    else if (key === ".") { if (navigator.clipboard) navigator.clipboard.writeText(window.location.href); }
    else if (SECTIONS[key]) show(document.getElementById(SECTIONS[key]));
    else done = false;
    if (done) event.preventDefault();
  });
})();
