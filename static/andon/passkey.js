"use strict";
// Passkeys: sign in, prove that it is you, add one. The server makes the challenge and checks the answer;
// here it only goes to the browser and comes back as a field of the form.
(function () {
  if (!window.PublicKeyCredential) return;
  document.documentElement.dataset.passkeys = ""; // shows the buttons; parts of a page may be swapped in later

  function bytes(text) {
    return Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (letter) => letter.charCodeAt(0));
  }

  function text(buffer) {
    return btoa(String.fromCharCode(...new Uint8Array(buffer)))
      .replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  }

  function readable(options) {
    const key = options.publicKey;
    key.challenge = bytes(key.challenge);
    if (key.user) key.user.id = bytes(key.user.id);
    for (const one of [...(key.allowCredentials || []), ...(key.excludeCredentials || [])]) one.id = bytes(one.id);
    return key;
  }

  function sendable(made) {
    const response = {};
    for (const name of ["clientDataJSON", "attestationObject", "authenticatorData", "signature", "userHandle"]) {
      if (made.response[name]) response[name] = text(made.response[name]);
    }
    if (made.response.getTransports) response.transports = made.response.getTransports();
    return JSON.stringify({
      id: made.id, rawId: text(made.rawId), type: made.type, response,
      clientExtensionResults: made.getClientExtensionResults(),
    });
  }

  const address = (form) => new URL(form.getAttribute("action") || location.href, location.href).pathname;
  const words = (form) => Array.from(form.querySelectorAll("[name=password], [name=code]"));

  function say(form, sentence) {
    const place = form.querySelector("[data-passkey-says]");
    if (place) place.textContent = sentence;
  }

  // What else the form wants, the password and the code left out: the passkey stands in for them.
  function complete(form) {
    const wanted = words(form).filter((field) => field.required);
    for (const field of wanted) field.required = false;
    const fits = form.reportValidity();
    for (const field of wanted) field.required = true;
    return fits;
  }

  async function run(form, input) {
    if (form.dataset.busy || !complete(form)) return;
    form.dataset.busy = "1";
    say(form, "");
    try {
      const asked = new FormData();
      asked.set("csrfmiddlewaretoken", form.querySelector("[name=csrfmiddlewaretoken]").value);
      asked.set("for", address(form));
      const answer = await fetch(input.dataset.options, { method: "POST", body: asked, credentials: "same-origin" });
      if (!answer.ok) {
        const said = await answer.json().catch(() => ({}));
        return say(form, said.says || "The server did not answer. Open the page again.");
      }
      const publicKey = readable(await answer.json());
      const made = input.dataset.passkey === "create"
        ? await navigator.credentials.create({ publicKey }) : await navigator.credentials.get({ publicKey });
      input.value = sendable(made);
      form.submit();
    } catch (error) {
      say(form, error.name === "InvalidStateError"
        ? "This device has a passkey for you already."
        : navigator.onLine === false ? "Not sent, still offline." : "No passkey was used. Try again, or use another way.");
    } finally {
      delete form.dataset.busy;
    }
  }

  const field = (form) => form.querySelector("input[data-passkey]");

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-passkey-button]");
    if (button) run(button.form, field(button.form));
  });
  // The form's own button does the same when nothing was typed.
  document.addEventListener("submit", (event) => {
    const form = event.target, input = field(form);
    if (!input || input.value || words(form).some((typed) => typed.value)) return;
    event.preventDefault();
    run(form, input);
  });
})();
