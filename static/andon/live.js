"use strict";
// Keeps a page true without reloading it: fragments by ETag, clocks, copy buttons, recap of the section bar.
//
// Three traps this avoids: the browser hides a 304 and htmx would swap the cached body again; a script that
// sends If-None-Match itself would make htmx swap in nothing (see responseHandling in base.html); and trigger
// filters would need eval. Nothing is swapped that holds the focus or an edited form.
(function () {
  const parts = Array.from(document.querySelectorAll("[data-poll]"));
  const due = new Map(parts.map((part) => [part, Date.now() + every(part)]));
  let failures = 0, checkedAt = Date.now(), lostAt = null, hiddenTick = 0;

  function every(part) {
    return 1000 * Number(part.dataset.slow || part.dataset.poll);
  }

  function tick() {
    const now = Date.now();
    // A hidden tab asks only for the first part (it keeps the title right), once a minute.
    if (document.hidden) {
      if (now - hiddenTick < 60000) return;
      hiddenTick = now;
      if (parts[0]) fire(parts[0]);
      return;
    }
    for (const part of parts) if (now >= due.get(part)) fire(part);
    if (lostAt === null) refreshTimes();
    sayLive();
  }

  function fire(part) {
    due.set(part, Date.now() + every(part));
    htmx.trigger(part, "andon:tick");
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) parts.forEach(fire); });

  document.body.addEventListener("htmx:configRequest", (event) => {
    const etag = event.target.dataset.etag;
    if (etag) event.detail.headers["If-None-Match"] = etag;
  });

  document.body.addEventListener("htmx:beforeSwap", (event) => {
    const part = event.target, detail = event.detail, status = detail.xhr.status;
    if (!part.dataset || !part.dataset.poll || status !== 200) return;
    if (/\/sign-in/.test(detail.xhr.responseURL)) { detail.shouldSwap = false; window.location.reload(); return; }
    if (busy(part)) { detail.shouldSwap = false; offer(part); return; }
    part.dataset.etag = detail.xhr.getResponseHeader("ETag") || "";
    part._open = openDetails(part);
  });

  document.body.addEventListener("htmx:afterSwap", (event) => {
    const part = event.target;
    for (const summary of part._open || []) {
      for (const details of part.querySelectorAll("details")) if (label(details) === summary) details.open = true;
    }
    after(part);
  });

  document.body.addEventListener("htmx:afterRequest", (event) => {
    if (!event.target.dataset || !event.target.dataset.poll) return;
    const status = event.detail.xhr ? event.detail.xhr.status : 0;
    if (status === 200 || status === 304) { failures = 0; lostAt = null; checkedAt = Date.now(); }
    else { failures += 1; if (failures >= 3 && lostAt === null) lostAt = checkedAt; }
    sayLive();
  });

  function label(details) {
    const summary = details.querySelector("summary");
    return summary ? summary.textContent.replace(/[\d,]+/g, "#") : "";
  }

  function openDetails(part) {
    return Array.from(part.querySelectorAll("details[open]")).map(label);
  }

  function busy(part) {
    if (part.contains(document.activeElement)) return true;
    if (window.getSelection && !window.getSelection().isCollapsed && part.contains(window.getSelection().anchorNode)) return true;
    return Array.from(part.querySelectorAll("input:not([type=hidden]), textarea, select")).some((field) =>
      field.tagName === "SELECT"
        ? Array.from(field.options).some((option) => option.selected !== option.defaultSelected && field.selectedIndex > 0)
        : field.value !== field.defaultValue);
  }

  function offer(part) {
    if (part.querySelector(":scope > [data-changed]")) return;
    const note = document.createElement("p");
    note.className = "says warn";
    note.dataset.changed = "";
    note.setAttribute("role", "status");
    note.textContent = "Changed since you opened it, ";
    const button = document.createElement("button");
    button.type = "button";
    button.className = "plain";
    button.textContent = "reload";
    button.addEventListener("click", () => window.location.reload());
    note.append(button);
    part.prepend(note);
  }

  // Title, favicon and recap follow the answers.
  function after(root) {
    const titled = root.matches && root.matches("[data-title]") ? root : root.querySelector("[data-title]");
    if (titled) {
      document.title = titled.dataset.title + " | Andon";
      const icon = document.getElementById("icon");
      if (icon && icon.dataset[titled.dataset.icon]) icon.href = icon.dataset[titled.dataset.icon];
    }
    const source = root.querySelector("[data-recap-source]");
    const recap = document.querySelector("[data-recap]");
    if (source && recap) recap.replaceChildren(source.content.cloneNode(true));
    refreshTimes();
  }

  function duration(seconds) {
    const n = Math.max(0, Math.floor(seconds)), s = "\u00a0";
    if (n < 60) return n + s + "s";
    if (n < 3600) return Math.floor(n / 60) + s + "min";
    if (n < 86400) { const m = Math.floor(n % 3600 / 60); return Math.floor(n / 3600) + s + "h" + (m ? s + m + s + "min" : ""); }
    const h = Math.floor(n % 86400 / 3600);
    return Math.floor(n / 86400) + s + "d" + (h ? s + h + s + "h" : "");
  }

  // As runs.formatting writes GPU-hours and money.
  function accrued(form, amount) {
    const digits = form === "gpu_hours" ? 1 : amount < 9.995 ? 2 : 0;
    const text = amount.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return form === "gpu_hours" ? text + "\u00a0GPU\u2011hours" : "$" + text;
  }

  function refreshTimes() {
    const now = Date.now();
    for (const node of document.querySelectorAll("time[data-live]")) {
      const seconds = (now - Date.parse(node.dateTime)) / 1000;
      const text = node.dataset.live === "for" ? duration(seconds)
        : seconds <= -1 ? "in " + duration(-seconds) : duration(seconds) + " ago";
      if (node.textContent !== text) node.textContent = text;
    }
    for (const node of document.querySelectorAll("data[data-live]")) {
      const text = accrued(node.dataset.live, Number(node.value) * (now - Date.parse(node.dataset.since)) / 3600000);
      if (node.textContent !== text) node.textContent = text;
    }
    for (const node of document.querySelectorAll("time[title]")) {
      if (node._local) continue;
      node._local = true;
      node.title = node.dateTime + ", local " + new Date(node.dateTime).toLocaleString();
    }
    const clock = document.querySelector("[data-clock]");
    if (clock) clock.textContent = new Date().toISOString().slice(11, 19) + " UTC";
  }

  function sayLive() {
    for (const node of document.querySelectorAll("[data-live-state]")) {
      node.classList.toggle("lost", lostAt !== null);
      node.textContent = lostAt === null
        ? "Live, checked " + duration((Date.now() - checkedAt) / 1000) + " ago"
        : "Not live since " + new Date(lostAt).toISOString().slice(11, 19) + ", retrying";
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button.dataset.copy, button);
    const closed = event.target.closest("[aria-disabled=true]");
    if (closed) event.preventDefault();
  });

  document.addEventListener("andon:copy", (event) => copy(event.detail.text, event.detail.by));

  // A page from http://host has no clipboard of the newer kind: there the older command copies.
  function copy(text, by) {
    const done = navigator.clipboard ? navigator.clipboard.writeText(text) : olderCopy(text);
    done.then(() => say(by, "copied"), () => say(by, "not copied"));
  }

  function olderCopy(text) {
    const field = document.createElement("textarea"), before = document.activeElement;
    field.value = text;
    field.className = "vh";
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    if (before) before.focus({ preventScroll: true });
    return copied ? Promise.resolve() : Promise.reject(new Error("refused"));
  }

  function say(by, word) {
    if (!by || by._says) return;
    const before = Array.from(by.childNodes);
    by._says = true;
    by.replaceChildren(word);
    setTimeout(() => { by.replaceChildren(...before); by._says = false; }, 1500);
  }

  // A number is copied without its commas, a minus as a hyphen.
  document.addEventListener("copy", (event) => {
    const text = String(window.getSelection());
    if (!/^[\s\d,.\u2212\u00a0]+$/.test(text)) return;
    event.clipboardData.setData("text/plain", text.trim().replace(/(\d),(?=\d{3})/g, "$1").replace(/\u2212/g, "-"));
    event.preventDefault();
  });

  // An anchor inside a closed disclosure opens it.
  function openTarget() {
    const target = window.location.hash.length > 1 && document.getElementById(window.location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  }
  window.addEventListener("hashchange", openTarget);

  const mark = document.querySelector("[data-bar-mark]"), bar = document.querySelector(".bar");
  if (mark && bar) {
    new IntersectionObserver((seen) => {
      bar.classList.toggle("stuck", !seen[0].isIntersecting && seen[0].boundingClientRect.top < 0);
    }).observe(mark);
  }

  after(document.body);
  openTarget();
  setInterval(tick, 1000);
})();
