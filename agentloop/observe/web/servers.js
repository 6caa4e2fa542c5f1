// The inference servers, now and over the last hour: health, KV cache, running requests, tokens/s, cache hits, versions.
(() => {
  "use strict";
  const { view, h, setText, setAttr, keyed, table, sparkline, areas, format } = window.agentloop;
  const { isNumber, short, whole, percent, plural, span } = format;

  // Parts of a KV cache bar, in order.
  const PARTS = [
    { name: "held", label: "held" },
    { name: "reserved", label: "reserved" },
    { name: "parked", label: "waiting for a tool" },
    { name: "others", label: "used by others" },
    { name: "cached", label: "reusable" },
  ];

  const COLUMNS = [
    { text: "Server" },
    { text: "State" },
    { text: "KV cache, tokens" },
    { text: "Tokens/s", class: "num" },
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
    parts.history = areas(["kv-held", "kv-parked", "kv-cached"]);
    for (const name of ["rate", "running", "cached", "version"]) parts[name] = h("span", {});
    for (const name of ["rates", "batches"]) parts[name] = sparkline();
    const num = (label, ...some) => {
      const node = cell(label, some);
      node.classList.add("num");
      return node;
    };
    const row = h(
      "tr",
      { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, parts.url),
      cell("State", parts.state, parts.reason),
      cell("KV cache", parts.bar, parts.kv, parts.history.node),
      num("Tokens/s", parts.rate, parts.rates.node),
      num("Running requests", parts.running, parts.batches.node),
      num("Prefix cache hits", parts.cached),
      num("Weight version", parts.version),
    );
    row.parts = parts;
    return row;
  };

  const showHistory = ({ parts }, server, points) => {
    const series = (i) => points.map((point) => [point[0], point[i]]);
    setText(parts.rate, points.length ? short(points.at(-1)[1]) : "–");
    const most = points.length > 1 && `up to ${short(Math.max(...points.map(([, rate]) => rate)))} tokens/s in the last ${span(points.at(-1)[0] - points[0][0])}`;
    setAttr(parts.rates.node.parentNode, "title", most);
    parts.rates.draw(series(1));
    parts.batches.draw(series(2));
    parts.history.draw(points.map(([t, , , ...kv]) => [t, ...kv]), server.capacity);
  };

  const update = ({ parts }, server, current, t) => {
    setText(parts.url, server.url.replace(/^https?:\/\//, ""));
    setText(parts.state, isNumber(server.since) && !server.healthy ? `${server.state} for ${span(Math.max(t - server.since, 0))}` : server.state);
    setAttr(parts.state, "data-kind", server.healthy ? "good" : ["suspect", "stale"].includes(server.state) ? "warn" : "bad");
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
        h("li", {}, h("span", { class: "key kv-held", "aria-hidden": "true" }), "held: running requests"),
        h("li", {}, h("span", { class: "key kv-reserved", "aria-hidden": "true" }), "reserved: what running requests are expected to generate"),
        h("li", {}, h("span", { class: "key kv-parked", "aria-hidden": "true" }), "waiting for a tool: rollouts that go on here after it"),
        h("li", {}, h("span", { class: "key kv-others", "aria-hidden": "true" }), "used by others: requests of other clients"),
        h("li", {}, h("span", { class: "key kv-cached", "aria-hidden": "true" }), "reusable: prefixes of turns that have ended, evicted when space is needed"),
        h("li", {}, h("span", { class: "key kv-free", "aria-hidden": "true" }), "free"),
      );
      const queue = sparkline();
      const queued = h("p", { class: "queued", hidden: true }, h("span", {}), queue.node);
      const { table: node, body } = table("Inference servers", COLUMNS, "servers cards");
      const none = h("p", { class: "muted" });
      root.append(sum, legend, node, queued, none);

      const show = () => {
        const { servers, now } = store;
        keyed(body, servers, ({ url }) => url, make, (row, server) => update(row, server, now.policy_version, store.t));
        const healthy = servers.filter((one) => one.healthy).length;
        const running = servers.reduce((total, one) => total + (one.num_running ?? 0), 0);
        const kv = store.kvShare();
        const parts = [`${healthy} of ${plural(servers.length, "server")} healthy`, `${plural(running, "request")} running`];
        if (isNumber(kv)) parts.push(`${percent(kv)} of the KV cache held or reserved`);
        if (isNumber(now.num_waiting)) parts.push(`${plural(now.num_waiting, "request")} waiting for capacity`);
        setText(sum, parts.join(" · "));
        for (const one of [sum, legend, node]) one.hidden = !servers.length;
        none.hidden = servers.length > 0;
        setText(none, store.ready ? "No server is ready." : "Waiting for data…");
      };
      const draw = () => {
        for (const server of store.servers) showHistory(body.keyedNodes.get(server.url), server, store.served.get(server.url) ?? []);
        const points = store.history.get("num_waiting") ?? [];
        queued.hidden = points.length < 2 || !store.servers.length;
        if (queued.hidden) return;
        const most = Math.max(...points.map(([, value]) => value));
        setText(queued.firstChild, `Over the last ${span(points.at(-1)[0] - points[0][0])}, ${most ? `up to ${plural(most, "request")}` : "no request"} waited for capacity.`);
        queue.draw(most ? points : []);
      };
      show();
      draw();
      return store.on((changed) => {
        if (["servers", "now"].some((key) => changed.has(key))) show();
        if (changed.has("history")) draw();
      });
    },
  });
})();
