// The sandbox: its slots, who waits for one, how long calls take, how they end, what holds them in.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, panel, sparkline, format } = window.agentloop;
  const { isNumber, whole, percent, ms, plural } = format;

  // How a call ends: [status, what it means, kind]. The order is that of the table.
  const ENDS = [
    ["ok", "the program finished", "good"],
    ["error", "the tool or the program raised", ""],
    ["timeout", "killed: over its time", "bad"],
    ["oom", "killed: over its memory", "bad"],
    ["output_limit", "killed: it printed too much", "bad"],
    ["killed", "killed: by a signal, or for what it tried", "bad"],
    ["malformed", "the call could not be decoded; it never ran", ""],
    ["unknown_tool", "there is no such tool; it never ran", ""],
    ["bad_arguments", "the tool does not accept the arguments; it never ran", ""],
    ["caller", "the caller runs it", ""],
    ["cancelled", "the rollout ended first", ""],
    ["infrastructure", "infrastructure failure; does not count", "warn"],
    ["sandbox_error", "infrastructure failure; does not count", "warn"],
    ["overloaded", "refused: too many waited", "warn"],
  ];
  const MEANS = new Map(ENDS.map(([name, means, kind], place) => [name, { means, kind, place }]));
  const KILLS = ["timeout", "oom", "output_limit", "killed"];

  const mountTiles = (store) => {
    const list = h("ul", { class: "tiles", "aria-label": "The sandbox now" });
    const kills = ({ calls }) => calls && KILLS.reduce((sum, name) => sum + (calls[name] ?? 0), 0);
    const replaced = ({ replaced: count }) => count > 0 && `${whole(count)} replaced`;
    const TILES = [
      ["slots busy", "sandbox_busy", (one) => one.busy, (one) => `of ${whole(one.slots)}`],
      ["calls queued", "sandbox_waiting", (one) => one.waiting, () => "for a slot", (one) => one.waiting > 0 && "warn"],
      ["workers", null, (one) => one.workers, replaced, (one) => one.workers === 0 && "bad"],
      ["sessions", null, (one) => one.sessions, () => "open notebooks"],
      ["kills", null, kills, () => "by limits and signals"],
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
      const { latency_ms: latency, queued_ms: queued } = store.sandbox ?? {};
      const rows = [["total time", latency], ["time in queue", queued]].filter(([, of]) => of);
      keyed(body, rows, ([name]) => name, make, (row, [, of]) => {
        ["p50", "p90", "p99"].forEach((name, i) => setText(row.children[i + 1], ms(of[name])));
      });
      box.hidden = !rows.length;
    };
    const box = panel("Latency", node);
    return { node: box, update };
  };

  const mountEnds = (store) => {
    const columns = [{ text: "Ended by" }, { text: "Meaning" }, { text: "Calls", class: "num" }, { text: "Share", class: "num" }];
    const { table: node, body } = table("Calls by status", columns, "sb-ends");
    const none = h("p", { class: "muted" }, "No call has ended yet.");
    const total = h("p", { class: "muted" });
    const make = ([name]) => {
      const { means, kind } = MEANS.get(name) ?? { means: "", kind: "" };
      const bar = h("span", { class: "sb-bar", "data-kind": kind, "aria-hidden": "true" }, h("span", {}));
      const row = h(
        "tr",
        {},
        h("th", { scope: "row", "data-kind": kind }, name.replaceAll("_", " ")),
        h("td", {}, h("span", { class: "sb-means" }, means), bar),
        h("td", { class: "num" }),
        h("td", { class: "num" }),
      );
      row.bar = bar.firstChild;
      return row;
    };
    const update = () => {
      const calls = Object.entries(store.sandbox?.calls ?? {}).filter(([, count]) => count > 0);
      const place = (name) => MEANS.get(name)?.place ?? ENDS.length;
      calls.sort(([a], [b]) => place(a) - place(b));
      const all = calls.reduce((sum, [, count]) => sum + count, 0);
      keyed(body, calls, ([name]) => name, make, (row, [, count]) => {
        setText(row.children[2], whole(count));
        setText(row.children[3], percent(count / all));
        row.bar.style.width = `${(100 * count) / all}%`;
      });
      node.hidden = !calls.length;
      none.hidden = calls.length > 0;
      setText(total, calls.length ? `${plural(all, "call")} since the start` : "");
    };
    return { node: panel("Call status", none, node, total), update };
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
      const parts = [mountEnds(store), mountLatency(store), mountLayers(store)];
      const [ends, latency, layers] = parts;
      const empty = h("p", { class: "muted" });
      const columns = h("div", { class: "columns" }, h("div", {}, ends.node), h("div", {}, latency.node, layers.node));
      root.append(empty, tiles.node, columns);
      const update = (changed) => {
        const isKnown = store.sandbox !== null;
        empty.hidden = isKnown;
        columns.hidden = !isKnown;
        setText(empty, store.ready ? "This run has no sandbox." : "Waiting for the first numbers.");
        if (["sandbox", "history"].some((key) => changed.has(key))) tiles.update(changed);
        if (changed.has("sandbox")) for (const part of parts) part.update();
      };
      update(new Set(["sandbox", "history"]));
      return store.on(update);
    },
  });
})();
