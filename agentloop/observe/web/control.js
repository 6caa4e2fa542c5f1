// What whoever has the token may do to a run: buttons beside a view's title.
(() => {
  "use strict";
  const { h, keyed, setText } = window.agentloop;

  // `sure` is what is asked before. A rollout is cancelled where it is shown (trajectory.js).
  const BUTTONS = [
    { name: "pause", text: "Pause", when: ({ now }) => !now.paused },
    { name: "resume", text: "Resume", when: ({ now }) => now.paused },
    { name: "checkpoint", text: "Save a checkpoint", when: () => true },
    {
      name: "drain",
      text: "Drain",
      when: ({ now }) => !now.draining,
      sure: "Finish what is running, start nothing new, then stop. This cannot be undone.",
    },
  ];

  window.agentloop.control = (app) => {
    const { store, api } = app;
    // -> {done: "in words"}; asks for the token where it has none.
    app.control = (body) => api.post("api/control", body, { kind: "control" });

    const said = h("span", { role: "status", class: "said" });
    const row = h("div", { class: "control" });
    let clear = 0;

    const say = (text, kind) => {
      setText(said, text);
      said.dataset.kind = kind;
      clearTimeout(clear);
      clear = setTimeout(() => setText(said, ""), kind === "bad" ? 20_000 : 6000);
    };

    const press = async ({ name, text, sure }) => {
      if (sure) {
        const pressed = await app.dialog(`${text}?`, [h("p", {}, sure)], [["ok", text, "primary"], ["", "Cancel"]]);
        if (pressed !== "ok") return;
      }
      for (const button of row.children) button.disabled = true;
      try {
        const { done } = await app.control({ do: name });
        say(done, "good");
      } catch (error) {
        say(error.message, "bad");
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
      setText(said, "");
      document.getElementById("actions").replaceChildren(said, row);
      show();
    });
    store.on((changed) => {
      if (["about", "now"].some((key) => changed.has(key))) show();
    });
  };
})();
