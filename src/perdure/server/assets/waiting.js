// Sends the answers to waiting questions without leaving the page, so that nothing that was typed is lost if an answer is refused.
// Without this script, browsers send the forms themselves.
"use strict";
(() => {
  // Shows a message in the card of a question. A screen reader announces it.
  function showMessage(card, text, isError) {
    const message = card.querySelector(".notice") ?? card.appendChild(document.createElement("p"));
    message.className = isError ? "notice danger" : "notice";
    message.setAttribute("role", isError ? "alert" : "status");
    message.textContent = text;
  }

  // Subtracts one from the number of questions in the navigation. A number such as "50+" is not exact and stays.
  function decrementCount() {
    const count = document.querySelector("nav .count");
    const number = Number(count?.textContent.slice(1, -1));
    if (number) count.textContent = number > 1 ? `(${number - 1})` : "";
  }

  addEventListener("submit", async (event) => {
    const form = event.target, card = form.closest(".waiting .question");
    if (!card) return;
    event.preventDefault();
    if (form.dataset.sent) return; // The form was submitted twice.
    form.dataset.sent = "yes";
    const label = event.submitter?.textContent ?? "Answer";
    try {
      const body = new URLSearchParams(new FormData(form, event.submitter));
      const reply = await fetch(form.action, {method: "POST", body, headers: {Accept: "application/json"}});
      if (!reply.ok) return showMessage(card, (await reply.json()).detail, true);
      form.remove();
      showMessage(card, `Sent: ${label}. The run continues.`, false);
      decrementCount();
      document.querySelector(".waiting .question form :is(textarea, input:not([type=hidden]), button)")?.focus();
    } catch {
      showMessage(card, "The answer could not be sent. Send it again.", true);
    } finally {
      delete form.dataset.sent;
    }
  });
})();
