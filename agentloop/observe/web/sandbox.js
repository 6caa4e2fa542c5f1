// The sandbox: slots, queue, latency, calls by status, isolation layers.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, panel, sparkline, format } = window.agentloop;
  const { isNumber, whole, percent, ms, plural } = format;

  // [status, meaning, kind], in the order of the table.
  const STATUSES = [
    ["ok", "the program finished", "good"],
    ["error", "the tool or the program failed", ""],
    ["timeout", "killed at its time limit", "bad"],
    ["oom", "killed at its memory limit", "bad"],
    ["output_limit", "killed at its output limit", "bad"],
    ["killed", "killed by a signal, or because it crashed two workers", "bad"],
    ["malformed", "the call could not be decoded and did not run", ""],
    ["unknown_tool", "there is no such tool; the call did not run", ""],
    ["bad_arguments", "the tool rejected the arguments; the call did not run", ""],
    ["caller", "left for the caller to run", ""],
    ["cancelled", "the turn or the rollout ended first", ""],
    ["infrastructure", "infrastructure failure; not counted against the model", "warn"],
    ["sandbox_error", "infrastructure failure; not counted against the model", "warn"],
    ["overloaded", "refused because the queue was full", "warn"],
  ];
  const MEANINGS = new Map(STATUSES.map(([name, meaning, kind], position) => [name, { meaning, kind, position }]));
  const KILLS = ["timeout", "oom", "output_limit", "killed"];

  const mountTiles = (store) => {
    const list = h("ul", { class: "tiles", "aria-label": "Current state of the sandbox" });
    const kills = ({ calls }) => calls && KILLS.reduce((sum, name) => sum + (calls[name] ?? 0), 0);
    const lost = ({ lost: count }) => count > 0 && `${whole(count)} lost and replaced`;
    const TILES = [
      ["slots busy", "sandbox_busy", (one) => one.busy, (one) => `of ${whole(one.slots)}`],
      ["calls queued", "sandbox_waiting", (one) => one.waiting, () => "waiting for a slot", (one) => one.waiting > 0 && "warn"],
      ["workers", null, (one) => one.workers, lost, (one) => one.workers === 0 && "bad"],
      ["sessions", null, (one) => one.sessions, () => "notebooks open"],
      ["calls killed", null, kills, () => "at limits or by signals"],
    ];
    const make = ([label]) => {
      const parts = { number: h("span", { class: "number" }), note: h("span", { class: "note" }), spark: sparkline() };
      const node = h("li", { class: "tile" }, h("span", { class: "label" }, label), parts.number, parts.note, parts.spark.node);
      node.parts = parts;
      return node;
    };
    const update = (changed) => {
      const sandbox = store.sandbox ?? {};
      const shown = TILES.filter(([, , value]) => isNumber(value(sandbox)));
      keyed(list, shown, ([label]) => label, make, (node, [, history, value, note, kind]) => {
        setText(node.parts.number, whole(value(sandbox)));
        setText(node.parts.note, note(sandbox) || "");
        setAttr(node, "data-kind", kind?.(sandbox));
        if (changed.has("history") || !node.drawn) {
          node.drawn = true;
          node.parts.spark.draw(history ? store.history.get(history) : []);
        }
      });
      list.hidden = !shown.length;
    };
    return { node: list, update };
  };

  const mountLatency = (store) => {
    const columns = [{ text: "Recent calls" }, { text: "p50", class: "num" }, { text: "p90", class: "num" }, { text: "p99", class: "num" }];
    const { table: node, body } = table("Latency of recent calls", columns, "sb-latency");
    const make = ([name]) => h("tr", {}, h("th", { scope: "row" }, name), ["p50", "p90", "p99"].map(() => h("td", { class: "num" })));
    const update = () => {
      const { latency_ms: latency, queued_ms: queued, ran_ms: ran } = store.sandbox ?? {};
      const rows = [["total", latency], ["in the queue", queued], ["running", ran]].filter(([, of]) => of);
      keyed(body, rows, ([name]) => name, make, (row, [, of]) => {
        ["p50", "p90", "p99"].forEach((name, i) => setText(row.children[i + 1], ms(of[name])));
      });
      box.hidden = !rows.length;
    };
    const box = panel("Latency", node);
    return { node: box, update };
  };

  const mountStatuses = (store) => {
    const columns = [{ text: "Status" }, { text: "Meaning" }, { text: "Calls", class: "num" }, { text: "Share", class: "num" }];
    const { table: node, body } = table("Calls by status", columns, "sb-statuses");
    const none = h("p", { class: "muted" }, "No calls have ended yet.");
    const total = h("span", { class: "muted" });
    const failed = h("a", { href: "#/rollouts?state=errors" }, "Rollouts with failed calls");
    const make = ([name]) => {
      const { meaning, kind } = MEANINGS.get(name) ?? { meaning: "", kind: "" };
      const bar = h("span", { class: "sb-bar", "data-kind": kind, "aria-hidden": "true" }, h("span", {}));
      const row = h(
        "tr",
        {},
        h("th", { scope: "row", "data-kind": kind }, name.replaceAll("_", " ")),
        h("td", {}, h("span", { class: "sb-meaning" }, meaning), bar),
        h("td", { class: "num" }),
        h("td", { class: "num" }),
      );
      row.bar = bar.firstChild;
      return row;
    };
    const update = () => {
      const calls = Object.entries(store.sandbox?.calls ?? {}).filter(([, count]) => count > 0);
      const position = (name) => MEANINGS.get(name)?.position ?? STATUSES.length;
      calls.sort(([a], [b]) => position(a) - position(b));
      const all = calls.reduce((sum, [, count]) => sum + count, 0);
      keyed(body, calls, ([name]) => name, make, (row, [, count]) => {
        setText(row.children[2], whole(count));
        setText(row.children[3], percent(count / all));
        row.bar.style.width = `${(100 * count) / all}%`;
      });
      node.hidden = !calls.length;
      none.hidden = calls.length > 0;
      setText(total, calls.length ? `${plural(all, "call")} since the start of the run. ` : "");
      failed.hidden = !calls.length;
    };
    return { node: panel("Calls by status", none, node, h("p", {}, total, failed)), update };
  };

  const mountLayers = (store) => {
    const list = h("dl", { class: "values" });
    const make = ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}));
    const backend = h("p", { class: "sb-backend" });
    const box = panel("Isolation", backend, list);
    const update = () => {
      const { layers, backend: name } = store.sandbox ?? {};
      const rows = Object.entries(layers ?? {});
      setText(backend, name ? `Backend: ${name}` : "");
      keyed(list, rows, ([layer]) => layer, make, (row, [, what]) => setText(row.lastChild, String(what)));
      box.hidden = !rows.length && !name;
    };
    return { node: box, update };
  };

  view("sandbox", {
    title: "Sandbox",
    mount(root, params, { store }) {
      const tiles = mountTiles(store);
      const parts = [mountStatuses(store), mountLatency(store), mountLayers(store)];
      const [statuses, latency, layers] = parts;
      const empty = h("p", { class: "muted" });
      const columns = h("div", { class: "columns" }, h("div", {}, statuses.node), h("div", {}, latency.node, layers.node));
      root.append(empty, tiles.node, columns);
      const update = (changed) => {
        const isKnown = store.sandbox !== null;
        empty.hidden = isKnown;
        columns.hidden = !isKnown;
        setText(empty, store.ready ? "This run has no sandbox." : "Waiting for data…");
        if (["sandbox", "history"].some((key) => changed.has(key))) tiles.update(changed);
        if (changed.has("sandbox")) for (const part of parts) part.update();
      };
      update(new Set(["sandbox", "history"]));
      return store.on(update);
    },
  });
})();
