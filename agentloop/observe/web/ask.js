// A form for a visitor's question, which starts a rollout and opens its view.
(() => {
  "use strict";
  const { view, h, setText, keyed, keptForSession, parts } = window.agentloop;

  const MAX_CHARS = 100_000;
  const MAX_REMEMBERED = 10;
  const EXAMPLES = ["What is 37 times 48?", "What is 19 times 23 plus 5?", "What is 12 times 12 minus 44?"];

  const asked = () => {
    try {
      const kept = JSON.parse(keptForSession.get("asked") ?? "[]");
      return Array.isArray(kept) ? kept : [];
    } catch {
      return [];
    }
  };

  const remember = (id, question) => {
    const all = [{ id, question: question.slice(0, 200) }, ...asked()].slice(0, MAX_REMEMBERED);
    keptForSession.set("asked", JSON.stringify(all));
  };

  let draft = ""; // kept when the view is closed

  view("ask", {
    title: "Ask",
    mount(root, params, app) {
      const { store, api } = app;
      let [closed, isOffline] = [false, false];
      const field = h("textarea", {
        id: "question",
        rows: 4,
        maxlength: MAX_CHARS,
        required: true,
        "aria-describedby": "question-how question-paused",
        oninput: () => (draft = field.value),
        onkeydown: (event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          form.requestSubmit();
        },
      });
      field.value = draft;
      const button = h("button", { type: "submit", class: "primary" }, "Ask");
      const paused = h("p", { id: "question-paused", role: "status", class: "warn" });
      const error = h("p", { role: "alert", class: "bad" });
      const state = h("span", { role: "status", class: "muted" });

      const ask = async (event) => {
        event.preventDefault();
        const question = field.value.trim();
        if (!question || button.disabled) return;
        button.disabled = true;
        setText(error, "");
        isOffline = false;
        setText(state, "Starting…");
        try {
          const { rollout } = await api.post("api/ask", { question });
          draft = "";
          remember(rollout, question);
          if (!closed) app.go(parts.hash("rollout", rollout));
        } catch (failure) {
          setText(error, `Could not send the question: ${failure.message}`);
          isOffline = failure.status === 0;
          field.focus();
        } finally {
          button.disabled = false;
          setText(state, "");
        }
      };

      const form = h(
        "form",
        { class: "ask", onsubmit: ask },
        h("label", { for: "question" }, "Question"),
        field,
        h("p", { id: "question-how", class: "muted" }, "Press Enter to ask, Shift+Enter for a new line. You can watch the rollout as it runs."),
        paused,
        error,
        h("div", { class: "ask-buttons" }, button, state),
      );
      const example = (text) =>
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              field.value = draft = text;
              field.focus();
            },
          },
          text,
        );
      const examples = h(
        "div",
        { class: "ask-examples", role: "group", "aria-label": "Examples" },
        h("span", { class: "muted" }, "For example:"),
        EXAMPLES.map(example),
      );
      const list = h("ul", { class: "ask-before" });
      const before = h("section", { "aria-labelledby": "ask-before" }, h("h2", { id: "ask-before" }, "Asked in this tab"), list);
      const closedNote = h("p", { class: "muted" }, "Questions cannot be asked here.");
      root.append(closedNote, form, examples, before);

      const show = () => {
        const can = store.about.can_ask !== false && !api.exported;
        form.hidden = examples.hidden = !can;
        closedNote.hidden = can;
        const kept = asked();
        before.hidden = !kept.length;
        // A paused training run still answers questions.
        const refuses = store.now.paused && store.about.kind === "serve";
        setText(paused, refuses ? "The service is paused: questions are refused until it is resumed." : "");
        const make = ({ id, question }) => h("li", {}, h("a", { href: parts.hash("rollout", id) }, question), h("span", { class: "muted" }));
        keyed(list, kept, ({ id }) => id, make, (node, { id }) => {
          const row = store.rollouts.get(id);
          setText(node.lastChild, row ? row.answer || parts.stateText(row.state === "live" ? "live" : (row.stop ?? row.state)) : "");
        });
      };
      show();
      const off = store.on((changed) => {
        if (["about", "rollouts", "now"].some((key) => changed.has(key))) show();
        if (isOffline && changed.has("connection") && store.connection.state === "open") setText(error, "");
      });
      return () => {
        closed = true;
        off();
      };
    },
  });
})();
