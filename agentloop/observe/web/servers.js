// The inference servers: health, KV cache, running requests, prefix cache hits and weight versions.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, format } = window.agentloop;
  const { isNumber, short, whole, percent, plural } = format;

  // Parts of a KV cache bar, in order.
  const PARTS = [
    { name: "held", label: "held" },
    { name: "reserved", label: "reserved" },
    { name: "parked", label: "parked" },
    { name: "others", label: "used by others" },
    { name: "cached", label: "evictable" },
  ];

  const COLUMNS = [
    { text: "Server" },
    { text: "State" },
    { text: "KV cache, tokens" },
    { text: "Running requests", class: "num" },
    { text: "Prefix cache hits", class: "num" },
    { text: "Weight version", class: "num" },
  ];

  const cell = (name, ...children) => h("td", { role: "cell", "data-label": name }, children);

  const make = () => {
    const parts = { url: h("span", { class: "mono url" }), state: h("span", { class: "state" }), reason: h("span", { class: "reason" }) };
    parts.bars = PARTS.map(({ name }) => h("span", { class: `kv-${name}` }));
    parts.kv = h("span", { class: "kv-text" });
    parts.bar = h("span", { class: "kv", "aria-hidden": "true" }, parts.bars);
    for (const name of ["running", "cached", "version"]) parts[name] = h("span", {});
    const num = (label, part) => {
      const node = cell(label, part);
      node.classList.add("num");
      return node;
    };
    const row = h(
      "tr",
      { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, parts.url),
      cell("State", parts.state, parts.reason),
      cell("KV cache", parts.bar, parts.kv),
      num("Running requests", parts.running),
      num("Prefix cache hits", parts.cached),
      num("Weight version", parts.version),
    );
    row.parts = parts;
    return row;
  };

  const update = ({ parts }, server, current) => {
    setText(parts.url, server.url.replace(/^https?:\/\//, ""));
    setText(parts.state, server.state);
    setAttr(parts.state, "data-kind", server.healthy ? "good" : server.state === "suspect" ? "warn" : "bad");
    setText(parts.reason, server.reason ?? "");
    const capacity = server.capacity || 0;
    PARTS.forEach(({ name }, i) => {
      const share = capacity ? Math.min((server[name] ?? 0) / capacity, 1) : 0;
      parts.bars[i].style.width = `${100 * share}%`;
    });
    const amounts = PARTS.filter(({ name }) => isNumber(server[name]) && (server[name] || !["others", "cached"].includes(name))).map(({ name, label }) => `${short(server[name])} ${label}`);
    setText(parts.kv, capacity ? `${amounts.join(", ")} of ${short(capacity)}` : "capacity unknown");
    setText(parts.running, whole(server.num_running));
    setText(parts.cached, percent(server.cached_fraction));
    const isStale = current && server.version && server.version !== current;
    setText(parts.version, server.version ? `${server.version}${isStale ? " (stale)" : ""}` : "–");
    setAttr(parts.version, "data-kind", isStale && "warn");
  };

  view("servers", {
    title: "Servers",
    mount(root, params, { store }) {
      const sum = h("p", { class: "summary" });
      const legend = h(
        "ul",
        { class: "legend", "aria-label": "Parts of the KV cache" },
        h("li", {}, h("span", { class: "key kv-held", "aria-hidden": "true" }), "held: tokens of running requests"),
        h("li", {}, h("span", { class: "key kv-reserved", "aria-hidden": "true" }), "reserved: tokens that running requests are expected to generate"),
        h("li", {}, h("span", { class: "key kv-parked", "aria-hidden": "true" }), "parked: context of rollouts that are running tools"),
        h("li", {}, h("span", { class: "key kv-others", "aria-hidden": "true" }), "used by others: requests of other clients"),
        h("li", {}, h("span", { class: "key kv-cached", "aria-hidden": "true" }), "evictable: cached prefixes of finished turns"),
        h("li", {}, h("span", { class: "key kv-free", "aria-hidden": "true" }), "free"),
      );
      const { table: node, body } = table("Inference servers", COLUMNS, "servers cards");
      const none = h("p", { class: "muted" });
      root.append(sum, legend, node, none);

      const show = () => {
        const { servers, now } = store;
        keyed(body, servers, ({ url }) => url, make, (row, server) => update(row, server, now.policy_version));
        const healthy = servers.filter((one) => one.healthy).length;
        const running = servers.reduce((total, one) => total + (one.num_running ?? 0), 0);
        const kv = store.kvShare();
        const parts = [`${healthy} of ${plural(servers.length, "server")} healthy`, `${plural(running, "request")} running`];
        if (isNumber(kv)) parts.push(`${percent(kv)} of the KV cache held or reserved`);
        if (isNumber(now.num_waiting)) parts.push(`${plural(now.num_waiting, "request")} waiting for capacity`);
        setText(sum, parts.join(" · "));
        for (const one of [sum, legend, node]) one.hidden = !servers.length;
        none.hidden = servers.length > 0;
        setText(none, store.ready ? "This run has no servers." : "Waiting for data…");
      };
      show();
      return store.on((changed) => {
        if (["servers", "now"].some((key) => changed.has(key))) show();
      });
    },
  });
})();
