"use strict";
// What the incident's own pages do beside the frame: copy a text that is made at that moment, or a field.
(function () {
  document.addEventListener("click", (event) => {
    const from = event.target.closest("[data-copy-from]");
    if (from && navigator.clipboard) {
      // One tap copies and sends: the form waits for the text, and is sent also when nothing can be copied.
      event.preventDefault();
      fetch(from.dataset.copyFrom).then((answer) => answer.text())
        .then((text) => navigator.clipboard.writeText(text)).catch(() => {}).then(() => from.form.submit());
    }
    const field = event.target.closest("[data-copy-field]");
    if (field) {
      const text = document.getElementById(field.dataset.copyField).value;
      document.dispatchEvent(new CustomEvent("andon:copy", { detail: { text: text, by: field } }));
    }
  });

  // The timeline by who did it: people, the trainer or Andon. The choice stands in the address.
  function chosen() { return new URLSearchParams(window.location.search).get("by") || ""; }

  function narrow() {
    const who = chosen(), rows = Array.from(document.querySelectorAll("#timeline tr[data-by]"));
    for (const row of rows) row.hidden = who !== "" && row.dataset.by !== who;
    const none = document.querySelector("#timeline [data-none]");
    if (none) none.hidden = rows.some((row) => !row.hidden);
    for (const one of document.querySelectorAll("[data-timeline]")) one.setAttribute("aria-pressed", String(one.dataset.timeline === who));
  }

  document.addEventListener("click", (event) => {
    const one = event.target.closest("[data-timeline]");
    if (!one) return;
    const url = new URL(window.location.href);
    if (chosen() === one.dataset.timeline) url.searchParams.delete("by");
    else url.searchParams.set("by", one.dataset.timeline);
    history.replaceState(null, "", url);
    narrow();
  });
  document.body.addEventListener("htmx:afterSwap", (event) => { if (event.target.id === "timeline-part") narrow(); });
  narrow();

  // A pasted or dropped image is kept as evidence at once; its Markdown stands where the cursor was.
  document.addEventListener("paste", (event) => attach(event, event.clipboardData));
  document.addEventListener("drop", (event) => attach(event, event.dataTransfer));

  function attach(event, given) {
    const text = event.target.closest && event.target.closest("textarea[data-images]");
    const images = text && given ? Array.from(given.files).filter((file) => file.type.startsWith("image/")) : [];
    if (!images.length) return;
    event.preventDefault();
    for (const file of images) send(text, file);
  }

  function send(text, file) {
    const body = new FormData(), says = text.form.querySelector("[data-image-says]");
    body.append("image", file, file.name || "pasted");
    body.append("csrfmiddlewaretoken", text.form.elements.csrfmiddlewaretoken.value);
    says.hidden = true;
    fetch(text.dataset.images, { method: "POST", body: body })
      .then((answer) => answer.json())
      .then((told) => {
        if (told.markdown) text.setRangeText(told.markdown + "\n", text.selectionStart, text.selectionEnd, "end");
        else fail(says, told.says);
      })
      .catch(() => fail(says, "Not attached: no answer. Your text is still here."));
  }

  function fail(says, text) {
    says.textContent = text;
    says.hidden = false;
  }
})();
