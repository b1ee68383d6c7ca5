"use strict";
// Single keys: they move and open, and never request, approve, waive or delete.
(function () {
  const dialog = document.getElementById("keys");
  if (!dialog) return;
  const off = document.getElementById("keys-off");
  // A browser that keeps nothing for us still has its keys.
  function kept() { try { return localStorage.getItem("andon-keys"); } catch (error) { return null; } }
  off.checked = kept() === "off";
  off.addEventListener("change", () => {
    try { localStorage.setItem("andon-keys", off.checked ? "off" : "on"); } catch (error) { /* for this page only */ }
  });
  for (const button of document.querySelectorAll("[data-keys]")) button.addEventListener("click", () => dialog.showModal());

  const GO_WITHIN_MS = 1500;
  const SECTIONS = { e: "evidence", t: "timeline", d: "diagnosis", p: "plan" };
  let going = 0;

  function rows() {
    return Array.from(document.querySelectorAll("[data-rows] tbody tr, ul[data-rows] li")).filter(opener);
  }

  function opener(item) { return item.querySelector("[data-open]") || item.querySelector("a"); }

  // The row after or before the one that has the focus, or had it last: a part that was swapped lost its mark.
  function move(by) {
    const all = rows();
    if (!all.length) return section(by);
    let at = all.findIndex((item) => item.contains(document.activeElement));
    if (at < 0) at = all.findIndex((item) => item.getAttribute("aria-current") === "true");
    const row = Math.max(0, Math.min(all.length - 1, at + by));
    for (const item of all) item.removeAttribute("aria-current");
    all[row].setAttribute("aria-current", "true");
    opener(all[row]).focus();
    return true;
  }

  function sections() {
    const named = Array.from(document.querySelectorAll(".bar > a[href^='#']"));
    const found = named.length
      ? named.map((link) => document.getElementById(link.hash.slice(1)))
      : Array.from(document.querySelectorAll("main section"));
    return found.filter((part) => part && part.offsetParent);
  }

  function section(by) {
    const all = sections();
    if (!all.length) return false;
    // Where a section comes to stand when it is shown: below what sticks to the top.
    const edge = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop) || 0;
    let at = all.indexOf(document.activeElement);
    if (at < 0) {
      const tops = all.map((part) => part.getBoundingClientRect().top - edge);
      at = tops.filter((top) => top <= 2).length - 1;
      if (by < 0 && at >= 0 && tops[at] < -2) at += 1; // inside of one: first back to its own head
    }
    return show(all[Math.max(0, Math.min(all.length - 1, at + by))]);
  }

  function show(target) {
    if (!target) return false;
    target.scrollIntoView({ block: "start" });
    if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
    target.focus({ preventScroll: true });
    return true;
  }

  function go(key) {
    const link = document.querySelector("nav [data-go='" + CSS.escape(key) + "']");
    if (link) window.location.href = link.href;
  }

  function search() {
    const find = document.getElementById("find");
    if (find && find.offsetParent) find.focus(); else window.location.href = "/search";
  }

  function acknowledge() {
    const button = Array.from(document.querySelectorAll("[data-acknowledge]")).find((one) => one.offsetParent);
    if (button) button.click();
    return Boolean(button);
  }

  function firstBad() {
    const there = show(document.getElementById("grid"));
    document.dispatchEvent(new CustomEvent("andon:first-bad"));
    return there;
  }

  function note() {
    const text = document.getElementById("note-text");
    if (!text) return false;
    text.closest("details").open = true;
    show(document.getElementById("notes"));
    text.focus();
    return true;
  }

  function copyLink() {
    document.dispatchEvent(new CustomEvent("andon:copy", { detail: { text: window.location.href, by: document.querySelector(".keys[data-keys]") } }));
    return true;
  }

  function filter(key) {
    const chip = document.querySelectorAll("[data-chip]")[Number(key) - 1];
    if (chip) window.location.href = chip.href;
    return Boolean(chip);
  }

  // Returns whether the key meant something here.
  function press(key, inGrid) {
    if (key === "?") { dialog.showModal(); return true; }
    if (key === "/") { search(); return true; }
    if (key === "g") { going = Date.now(); return true; }
    if (key === ".") return copyLink();
    if (inGrid) return false;
    if (key === "j" || key === "k") return move(key === "j" ? 1 : -1);
    if (key === "]" || key === "[") return section(key === "]" ? 1 : -1);
    if (/^[1-6]$/.test(key)) return filter(key);
    if (!document.getElementById("answers")) return false;
    if (key === "a") return acknowledge();
    if (key === "f") return firstBad();
    if (key === "m") return note();
    return SECTIONS[key] ? show(document.getElementById(SECTIONS[key])) : false;
  }

  document.addEventListener("keydown", (event) => {
    if (off.checked || event.ctrlKey || event.metaKey || event.altKey || event.isComposing || dialog.open) return;
    const at = event.target;
    if (at.matches && at.matches("input, textarea, select, [contenteditable]")) return;
    if (event.key === "Shift") return;
    if (going && Date.now() - going < GO_WITHIN_MS) {
      // The letter belongs to the g: `g a` must not acknowledge.
      going = 0;
      event.preventDefault();
      go(event.key);
      return;
    }
    going = 0;
    if (press(event.key, at.closest && at.closest("[role=application]"))) event.preventDefault();
  });
})();
