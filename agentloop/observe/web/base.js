// Helpers shared by all views: the registry of views, DOM elements, and number formats.
//
// Model output is untrusted, so it is only ever set as text: nothing on this page parses HTML.
(() => {
  "use strict";
  const agentloop = (window.agentloop = { views: new Map() });

  // {title, mount(root, params, app) -> unmount}; `params` has `id` and `query`.
  agentloop.view = (name, view) => agentloop.views.set(name, view);

  // --- elements -------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const SVG_TAGS = new Set(["svg", "path", "line"]);

  // Creates an element: h("a", {href: "#/", class: "x", onclick: f}, "text", element). Null and false are skipped.
  const h = (tag, props, ...children) => {
    const svg = SVG_TAGS.has(tag);
    const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(props ?? {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
    return node;
  };

  const setText = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };

  const setAttr = (node, name, value) => {
    if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  };

  // Reconciles `parent`'s children with `items`, by key and in order. Elements of remaining items are
  // reused, so that focus and selection survive. `make(item)` returns an element; `update(element, item)`.
  const keyed = (parent, items, key, make, update) => {
    const old = (parent.keyedNodes ??= new Map());
    const fresh = new Map();
    let at = parent.firstChild;
    for (const item of items) {
      const name = key(item);
      if (fresh.has(name)) continue;
      const node = old.get(name) ?? make(item);
      update(node, item);
      fresh.set(name, node);
      if (node === at) at = at.nextSibling;
      else parent.insertBefore(node, at);
    }
    for (const [name, node] of old) if (!fresh.has(name)) node.remove();
    parent.keyedNodes = fresh;
  };

  // Returns {table, body} of a new table with a header row. Columns: {text, class}.
  const table = (caption, columns, className) => {
    const body = h("tbody", { role: "rowgroup" });
    const head = columns.map(({ text, class: name }) =>
      h("th", { scope: "col", role: "columnheader", class: name }, text),
    );
    const node = h(
      "table",
      { class: className, role: "table" }, // explicit roles, because phones display rows as blocks
      h("caption", { class: "hidden" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
      body,
    );
    return { table: node, body };
  };

  const panel = (title, ...children) => {
    const id = `panel-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
    const head = h("h2", { id }, title);
    return h("section", { class: "panel", "aria-labelledby": id }, head, children);
  };

  // A line over time that fills the width of its container. `draw(points)`: [[x, y], ...], sorted by x.
  const sparkline = () => {
    const path = h("path", { "vector-effect": "non-scaling-stroke" });
    const area = h("path", { class: "area" });
    const node = h(
      "svg",
      { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
      area,
      path,
    );
    const draw = (points) => {
      if (points.length < 2) return setAttr(node, "hidden", "");
      setAttr(node, "hidden", null);
      const [first, last] = [points[0][0], points[points.length - 1][0]];
      let high = 0;
      for (const [, y] of points) high = Math.max(high, y);
      const at = ([x, y]) =>
        `${((100 * (x - first)) / (last - first || 1)).toFixed(1)} ${(23 - 22 * (high ? Math.max(y, 0) / high : 0)).toFixed(1)}`;
      const line = points.map(at).join("L");
      path.setAttribute("d", `M${line}`);
      area.setAttribute("d", `M0 24L${line}L100 24Z`);
    };
    return { node, draw };
  };

  // Values over time, stacked: `draw([[t, ...values], ...], high)`, where `classes` name the areas from the bottom up.
  const areas = (classes) => {
    const paths = classes.map((name) => h("path", { class: name }));
    const node = h("svg", { class: "areas", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, paths);
    const draw = (points, high) => {
      setAttr(node, "hidden", points.length < 2 || !(high > 0) ? "" : null);
      if (points.length < 2 || !(high > 0)) return;
      const [first, last] = [points[0][0], points.at(-1)[0]];
      const x = (t) => ((100 * (t - first)) / (last - first || 1)).toFixed(1);
      const y = (value) => (24 - 24 * Math.min(value / high, 1)).toFixed(1);
      let below = points.map(() => 0);
      paths.forEach((path, i) => {
        const top = points.map((point, j) => below[j] + point[i + 1]);
        const line = (values) => points.map(([t], j) => `${x(t)} ${y(values[j])}`);
        path.setAttribute("d", `M${line(top).join("L")}L${line(below).reverse().join("L")}Z`);
        below = top;
      });
    };
    return { node, draw };
  };

  const download = (name, type, text) => {
    const href = URL.createObjectURL(new Blob([text], { type }));
    h("a", { href, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  };

  // --- formats of numbers and times --------------------------------------------------------------

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  const format = {
    isNumber,
    whole: (value) => (isNumber(value) ? whole.format(value) : "–"),
    // About three significant digits: 0.012, 3.4, 123, 4,567, 12.3k, 4.57M.
    short: (value) => {
      if (!isNumber(value)) return "–";
      const size = Math.abs(value);
      if (Number.isInteger(value) && size < 10_000) return whole.format(value);
      if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
      if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
      if (size >= 10_000) return `${(value / 1e3).toFixed(1)}k`;
      if (size >= 100) return whole.format(value);
      if (size >= 10) return value.toFixed(1);
      if (size >= 0.01 || size === 0) return String(Number(value.toPrecision(3)));
      return value.toExponential(1);
    },
    percent: (share) => (isNumber(share) ? `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%` : "–"),
    bytes: (value) => {
      if (!isNumber(value)) return "–";
      if (value < 1024) return `${whole.format(value)} B`;
      const unit = Math.min(Math.floor(Math.log2(value) / 10), 4);
      return `${(value / 1024 ** unit).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
    },
    ms: (value) => (isNumber(value) ? format.span(value / 1000) : "–"),
    // A duration in seconds: 3 ms, 0.8 s, 12 s, 4:05, 1:02:03, 3 d 4 h.
    span: (seconds) => {
      if (!isNumber(seconds)) return "–";
      if (seconds < 0.1) return `${Number((seconds * 1000).toPrecision(2))} ms`;
      if (seconds < 10) return `${seconds.toFixed(1)} s`;
      if (seconds < 60) return `${Math.floor(seconds)} s`;
      const rest = Math.floor(seconds);
      const two = (n) => String(n).padStart(2, "0");
      const [hours, minutes] = [Math.floor(rest / 3600), Math.floor(rest / 60) % 60];
      if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
      return hours ? `${hours}:${two(minutes)}:${two(rest % 60)}` : `${minutes}:${two(rest % 60)}`;
    },
    // A time of day in the reader's time zone: 14:03:09.
    clock: (unixSeconds) =>
      isNumber(unixSeconds)
        ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB", { hour12: false })
        : "",
    capitalized: (text) => text && text[0].toUpperCase() + text.slice(1),
    plural: (count, one, many) => `${format.whole(count)} ${count === 1 ? one : (many ?? `${one}s`)}`,
  };

  // Stores the reader's choices, if the browser allows it.
  const kept = (storage) => ({
    get(name) {
      try {
        return window[storage].getItem(`agentloop.${name}`);
      } catch {
        return null;
      }
    },
    set(name, value) {
      try {
        if (value === null) window[storage].removeItem(`agentloop.${name}`);
        else window[storage].setItem(`agentloop.${name}`, value);
      } catch {
        // Storage is not allowed: the choice lasts until the page is closed.
      }
    },
  });

  Object.assign(agentloop, {
    h,
    setText,
    setAttr,
    keyed,
    table,
    panel,
    sparkline,
    areas,
    download,
    format,
    kept: kept("localStorage"),
    keptForSession: kept("sessionStorage"),
    color: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
  });
})();
