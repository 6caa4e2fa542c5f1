// The frame around the views: routing, connection state, dialogs, keyboard shortcuts and theme.
(() => {
  "use strict";
  const { h, setText, setAttr, format, kept, views, api, makeStore, isEvaluation } = window.agentloop;

  const $ = (id) => document.getElementById(id);
  const store = makeStore();

  // --- router: #/name/id?query ------------------------------------------------------------------

  const VIEWS = ["now", "servers", "rollouts", "groups", "curves", "sandbox", "ask"];
  const PARENTS = { rollout: "rollouts", group: "groups" }; // the view that the navigation marks

  let [unmount, current, isFirst] = [null, "", true];

  const parse = (hash) => {
    const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
    const [name = "", ...rest] = path.split("/");
    const decode = (text) => {
      try {
        return decodeURIComponent(text);
      } catch {
        return text;
      }
    };
    const id = rest.length ? decode(rest.join("/")) : null;
    return { name: (!id && PARENTS[name]) || name || "now", id, query: new URLSearchParams(query) };
  };

  const go = (hash) => {
    const to = hash.startsWith("#") ? hash : `#${hash.startsWith("/") ? "" : "/"}${hash}`;
    if (location.hash === to) route();
    else location.hash = to;
  };

  const app = { store, api, go, time: store.time, params: null };

  const route = () => {
    const params = parse(location.hash);
    const target = `${params.name}/${params.id ?? ""}/${params.query.get("beside") ?? ""}`;
    if (target === current && unmount) return; // only the query has changed, which the view handles
    leave();
    current = target;
    app.params = params;
    const view = views.get(params.name);
    const root = h("div", { id: "view", "data-view": params.name });
    $("view").replaceWith(root);
    $("actions").replaceChildren();
    app.title(view?.title ?? "View not found");
    if (view) {
      try {
        unmount = view.mount(root, params, app) ?? (() => {});
      } catch (error) {
        console.error(error);
        root.append(h("p", { class: "bad" }, `This view failed: ${error.message}`));
      }
    } else {
      root.append(h("p", {}, "This view does not exist. ", h("a", { href: "#/" }, "Go to the overview.")));
    }
    for (const enter of app.entered) enter(params);
    for (const link of $("nav").querySelectorAll("a")) {
      const shown = link.dataset.view === (PARENTS[params.name] ?? params.name);
      setAttr(link, "aria-current", shown && "page");
      if (shown) link.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    if (!isFirst) {
      scrollTo(0, 0);
      $("title").focus({ preventScroll: true }); // so that screen readers announce the view
    }
    isFirst = false;
  };

  const leave = () => {
    try {
      unmount?.();
    } catch (error) {
      console.error(error);
    }
    unmount = null;
  };

  // Views may call it to replace the title that they were registered with.
  app.title = (text) => {
    setText($("title"), text);
    app.titleText = text;
    nameDocument();
  };
  app.entered = []; // called with the params after a view is mounted

  const nameDocument = () => {
    const { title, kind } = store.about;
    const shown = [app.titleText, app.params?.id].filter(Boolean).join(" ");
    document.title = [shown, title ?? kind, "agentloop"].filter(Boolean).join(" · ");
  };

  // --- the header: run, navigation, connection -------------------------------------------------------

  const showAbout = () => {
    const { title, model, kind, version } = store.about;
    setText($("about"), [...new Set([title, model])].filter(Boolean).join(" · "));
    setAttr($("about"), "title", [kind, version].filter(Boolean).join(", ") || null);
    nameDocument();
  };

  const availableViews = () => {
    const { about, servers, sandbox, groups, steps } = store;
    const isAvailable = {
      now: true,
      rollouts: true,
      servers: servers.length > 0 || about.live,
      groups: groups.size > 0 || about.kind !== "serve",
      // An evaluation has a row per task, so a curve over its rows would be meaningless.
      curves: !isEvaluation(about) && (steps.length > 0 || ![about.kind, about.of].includes("serve")),
      sandbox: about.has_sandbox || sandbox !== null,
      ask: about.can_ask && !api.exported,
    };
    return VIEWS.filter((name) => isAvailable[name]);
  };

  let navigation = [];
  const showNavigation = () => {
    const names = store.ready ? availableViews() : ["now", "servers", "rollouts"];
    if (names.join() === navigation.join()) return;
    navigation = names;
    const shown = PARENTS[app.params?.name] ?? app.params?.name ?? "now";
    const links = names.map((name) => {
      const title = views.get(name)?.title ?? name[0].toUpperCase() + name.slice(1);
      const current = name === shown ? "page" : null;
      return h("a", { href: name === "now" ? "#/" : `#/${name}`, "data-view": name, "aria-current": current }, title);
    });
    $("nav").replaceChildren(...links);
  };

  const showConnection = () => {
    const { state, error, retryMs } = store.connection;
    const { live, kind } = store.about;
    const isOpen = state === "open";
    const status = api.exported
      ? "exported"
      : store.now.ended
      ? store.now.ended.state
      : isOpen
        ? live === false || kind === "view"
          ? "from disk"
          : "live"
        : state === "connecting"
          ? "connecting"
          : retryMs === null
            ? "not connected"
            : "reconnecting";
    setText($("connection-text"), status);
    setAttr($("connection"), "data-state", status.replace(" ", "-"));
    setAttr($("connection"), "title", error || null);
    showNotice();
  };

  // Shown in every view and announced by screen readers when it changes.
  const showMode = () => {
    const { paused, draining } = store.now;
    setText($("mode"), draining ? "draining" : paused ? "paused" : "");
  };

  // One line above the view: the end of the run, a lost connection, missed updates.
  const showNotice = () => {
    const { state, error, retryMs } = store.connection;
    const parts = [];
    const { ended } = store.now;
    if (ended?.text) parts.push(h("span", {}, ended.text));
    else if (state === "lost" && lostSince && Date.now() - lostSince > 1500) {
      const what = retryMs === null ? "Not connected" : "Connection lost";
      const stale = store.ready ? " The data shown is out of date." : "";
      parts.push(h("span", {}, `${what}${error ? `: ${error}` : ""}.${stale} `));
      const text = retryMs === null ? "Connect" : "Connect now";
      parts.push(h("button", { type: "button", onclick: () => stream?.retry() }, text));
    } else if (store.missed > acknowledged) {
      const count = format.plural(store.missed - acknowledged, "update was", "updates were");
      parts.push(h("span", {}, `${count} missed because this page was too slow. The data shown is current. `));
      const close = () => {
        acknowledged = store.missed;
        showNotice();
      };
      parts.push(h("button", { type: "button", onclick: close }, "Dismiss"));
    }
    const text = parts.map((one) => one.textContent).join("");
    if ($("notice").textContent !== text) $("notice").replaceChildren(...parts);
    const kind = ended?.text ? { finished: "good", failed: "bad" }[ended.state] : state === "lost" && "bad";
    setAttr($("notice"), "data-kind", kind || "warn");
  };
  let [acknowledged, lostSince] = [0, 0];

  // --- the stream ---------------------------------------------------------------------------------

  let stream = null;

  const follow = () => {
    if (api.exported) {
      api.get("api/frame").then(
        (frame) => {
          store.apply({ ...frame, full: true });
          store.connected("open");
        },
        (error) => store.connected("lost", error.message),
      );
      return;
    }
    stream = api.subscribe("api/stream", {
      event: ({ event, data }) => {
        if (event === "frame") store.apply(data);
        if (store.now.ended && store.about.live !== false) {
          store.connected("ended");
          return true; // the server is shutting down
        }
        if (store.connection.state !== "open") {
          if (lostSince && Date.now() - lostSince > 1500) store.addToLog("Reconnected");
          lostSince = 0;
          store.connected("open");
        }
      },
      lost: (error, retryMs) => {
        if (!lostSince) {
          lostSince = Date.now();
          setTimeout(showNotice, 1600);
        }
        store.connected("lost", error?.message ?? "", retryMs);
      },
    });
  };

  // --- dialogs --------------------------------------------------------------------------------------

  // Shows `children` and the buttons [[value, text, class], ...]; returns the value of the pressed button, or "".
  const dialog = (title, children, buttons) =>
    new Promise((resolve) => {
      const press = ([value, text, name], i) =>
        h("button", { class: name, value, type: i ? "button" : "submit", onclick: i ? () => node.close(value) : null }, text);
      const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), children);
      form.append(h("div", { class: "buttons" }, buttons.map(press)));
      const node = h("dialog", { "aria-labelledby": "dialog-title" }, form);
      node.addEventListener("close", () => {
        node.remove();
        resolve(node.returnValue);
      });
      document.body.append(node);
      node.showModal();
    });

  const askToken = async (kind, reason) => {
    const input = h("input", {
      id: "token",
      type: "password",
      autocomplete: "off",
      required: true,
      spellcheck: "false",
      "aria-describedby": "token-why",
    });
    const why =
      kind === "control"
        ? "Controlling a run requires the control token. It was printed in the terminal when the run started."
        : "This service requires a token (serve.token).";
    const body = [
      h("p", { id: "token-why" }, why),
      reason ? h("p", { class: "bad", role: "alert" }, "Wrong token.") : null,
      h("label", { for: "token" }, "Token"),
      input,
      h("p", { class: "muted" }, "The token is stored in this tab only, until it is closed."),
    ];
    const pressed = await dialog("Token", body, [["ok", "Continue", "primary"], ["", "Cancel"]]);
    return pressed === "ok" ? input.value.trim() || null : null;
  };

  // --- theme and keys ---------------------------------------------------------------------------------

  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");

  const showTheme = () => {
    const other = theme() === "dark" ? "light" : "dark";
    setText($("theme"), theme() === "dark" ? "☀" : "☾");
    setAttr($("theme"), "aria-label", `Switch to the ${other} theme`);
    setAttr($("theme"), "title", `Switch to the ${other} theme`);
    store.touch("theme"); // canvases are redrawn
    window.dispatchEvent(new Event("agentloop:theme"));
  };

  const switchTheme = () => {
    const other = theme() === "dark" ? "light" : "dark";
    const isSystemTheme = other === (system.matches ? "dark" : "light");
    if (isSystemTheme) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = other;
    kept.set("theme", isSystemTheme ? null : other);
    showTheme();
  };

  const keys = () => [
    [`1 – ${navigation.length}`, "open a view, in the order of the navigation bar"],
    ["/", "focus the search field or the question"],
    ["↑ ↓ ⏎", "rollouts: select a row, open it"],
    ["← → + − f", "rollouts: move in time, zoom, follow the current time"],
    ["← → n p", "tokens of a rollout: move, next and previous forking token"],
    ["t", "switch between the dark and the light theme"],
    ["?", "show this list"],
    ["Esc", "close the dialog"],
  ];

  const showKeys = async () => {
    const off = h("input", { type: "checkbox", id: "keys-off" });
    off.checked = kept.get("keys") === "off";
    const rows = keys().map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]);
    const body = [h("dl", { class: "keys" }, rows), h("label", { class: "check" }, off, " Disable keyboard shortcuts")];
    const version = store.about.version ? h("p", { class: "muted" }, store.about.version) : null;
    await dialog("Keyboard shortcuts", [...body, version], [["ok", "Close", "primary"]]);
    kept.set("keys", off.checked ? "off" : null);
  };

  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target;
    if (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.key !== "?" && kept.get("keys") === "off") return;
    if (/^[1-9]$/.test(event.key)) {
      const name = navigation[event.key - 1];
      if (name) go(name === "now" ? "#/" : `#/${name}`);
    } else if (event.key === "/") {
      const field = $("view").querySelector("[data-search], input[type=search], textarea");
      if (field) field.focus();
      else if (navigation.includes("ask")) go("#/ask");
    } else if (event.key === "t") switchTheme();
    else if (event.key === "?") showKeys();
    else return;
    event.preventDefault();
  };

  // --- start ------------------------------------------------------------------------------------------

  const start = () => {
    api.askWith(askToken);
    app.dialog = dialog;
    window.agentloop.app = app;
    document.body.dataset.exported = api.exported;
    store.on((changed) => {
      if (changed.has("about")) showAbout();
      if (["about", "servers", "sandbox", "groups", "steps"].some((key) => changed.has(key))) showNavigation();
      if (changed.has("connection") || changed.has("about")) showConnection();
      else if (changed.has("missed")) showNotice();
      if (changed.has("now")) showMode();
      if (changed.has("now") && store.now.ended) showConnection();
    });
    $("theme").addEventListener("click", switchTheme);
    $("help").addEventListener("click", showKeys);
    system.addEventListener("change", showTheme);
    window.addEventListener("hashchange", route);
    document.addEventListener("keydown", pressed);
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the hash is the route
      $("main").focus();
    });
    showTheme();
    showNavigation();
    showConnection();
    window.agentloop.control?.(app);
    follow();
    route();
  };

  document.addEventListener("DOMContentLoaded", start); // by then all views are registered
})();
