// Buttons beside the title that control a run; they require the control token.
(() => {
  "use strict";
  const { h, keyed, setText } = window.agentloop;

  // `confirm` is shown before the action. The button that cancels a rollout is in its view (trajectory.js).
  const BUTTONS = [
    { name: "pause", text: "Pause", when: ({ now }) => !now.paused },
    { name: "resume", text: "Resume", when: ({ now }) => now.paused },
    { name: "checkpoint", text: "Save checkpoint", when: () => true },
    {
      name: "drain",
      text: "Drain",
      when: ({ now }) => !now.draining,
      confirm: "The groups in flight are completed, no new groups are started, and the run ends. This cannot be undone.",
    },
  ];

  window.agentloop.control = (app) => {
    const { store, api } = app;
    // Returns {done: description}; asks for the control token if it is not known.
    app.control = (body) => api.post("api/control", body, { kind: "control" });

    const message = h("span", { role: "status", class: "message" });
    const row = h("div", { class: "control" });
    let clear = 0;

    const showMessage = (text, kind) => {
      setText(message, text);
      message.dataset.kind = kind;
      clearTimeout(clear);
      clear = setTimeout(() => setText(message, ""), kind === "bad" ? 20_000 : 6000);
    };

    const press = async ({ name, text, confirm }) => {
      if (confirm) {
        const pressed = await app.dialog(`${text}?`, [h("p", {}, confirm)], [["ok", text, "primary"], ["", "Cancel"]]);
        if (pressed !== "ok") return;
      }
      for (const button of row.children) button.disabled = true;
      try {
        const { done } = await app.control({ do: name });
        showMessage(done, "good");
      } catch (error) {
        showMessage(error.message, "bad");
      } finally {
        for (const button of row.children) button.disabled = false;
      }
    };

    const show = () => {
      const offered = api.exported || store.now.ended ? [] : (store.about.controls ?? []);
      const isHere = app.params?.name === "now";
      const shown = BUTTONS.filter((one) => isHere && offered.includes(one.name) && one.when(store));
      const make = (one) => h("button", { type: "button", onclick: () => press(one) }, one.text);
      keyed(row, shown, (one) => one.name, make, () => {});
    };
    app.entered.push(({ name }) => {
      if (name !== "now") return;
      setText(message, "");
      document.getElementById("actions").replaceChildren(message, row);
      show();
    });
    store.on((changed) => {
      if (["about", "now"].some((key) => changed.has(key))) show();
    });
  };
})();
