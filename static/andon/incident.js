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
})();
