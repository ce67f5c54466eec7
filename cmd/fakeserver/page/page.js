// Keeps the page up to date. Without it the page is the same, after a reload.
"use strict";
(() => {
  const state = document.getElementById("state");
  let etag = "";
  let shown = {};

  function show(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    for (const id of ["faults", "timeline"]) {
      const next = fresh.getElementById(id);
      const old = document.getElementById(id);
      if (!next || next.outerHTML === shown[id]) continue;
      const marked = document.getSelection();
      if (!marked.isCollapsed && old.contains(marked.anchorNode)) continue; // somebody is copying a key
      shown[id] = next.outerHTML;
      old.replaceWith(next);
    }
    const chosen = document.getElementById("faults").dataset.chosen;
    for (const b of document.querySelectorAll("button[name=faults]")) {
      b.setAttribute("aria-pressed", String(b.value === chosen));
    }
  }

  function say(live) {
    const text = live ? "live" : "the server does not answer";
    if (state.textContent !== text) state.textContent = text;
    state.className = live ? "live" : "gone";
  }

  async function refresh() {
    try {
      const answer = await fetch("/_fake/live", { headers: etag ? { "If-None-Match": etag } : {} });
      if (answer.status === 200) {
        show(await answer.text());
        etag = answer.headers.get("ETag") || "";
      } else if (answer.status !== 304) {
        throw new Error(String(answer.status));
      }
      say(true);
    } catch {
      etag = "";
      say(false);
    }
  }

  async function loop() {
    if (!document.hidden) await refresh();
    setTimeout(loop, 400);
  }

  for (const form of document.forms) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const body = new URLSearchParams(new FormData(form, event.submitter));
      fetch(form.action, { method: "POST", body }).then(refresh, () => say(false));
    });
  }
  loop();
})();
