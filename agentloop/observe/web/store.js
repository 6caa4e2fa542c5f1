// What the page knows: frames of api/stream, merged; and what follows from them.
//
//     api/stream ──frames──> apply ──> state ──at most once an animation frame──> views
//                                └──> history (sparklines), log (what changed)
//
// All of it is bounded: rollouts and groups go when the server says so, rows of metrics are thinned,
// history and log keep the newest.
(() => {
  "use strict";
  const { api, format } = window.agentloop;

  const MAX_STEPS = 5000;
  const MAX_LOG = 200;
  const HISTORY_MS = 1000; // between two points
  const MAX_HISTORY = 600;

  const kvShare = (servers) => {
    const sum = (name) => servers.reduce((total, one) => total + (one[name] ?? 0), 0);
    const capacity = sum("capacity");
    return capacity ? (sum("held") + sum("reserved")) / capacity : null;
  };

  // What is drawn as a line over the last minutes, by its name.
  const MEASURES = {
    kv: (store) => kvShare(store.servers),
    healthy: ({ servers }) => (servers.length ? servers.filter((one) => one.healthy).length : null),
    sandbox_busy: (store) => store.sandbox?.busy,
    sandbox_waiting: (store) => store.sandbox?.waiting,
    ...Object.fromEntries(
      ["tokens_per_s", "calls_per_s", "in_flight", "num_waiting", "groups_open", "queue_groups"]
        .concat(["staleness", "refusals", "loop_lag_ms"])
        .map((name) => [name, (store) => store.now[name]]),
    ),
  };

  // Every second row of the older ones goes, those of an evaluation last.
  const thinned = (rows, max = MAX_STEPS) => {
    if (rows.length <= max) return rows;
    const border = rows.length - Math.floor(max / 5);
    const isRare = (row) => !["reward", "learner/loss", "start/step"].some((name) => name in row);
    const half = (keeps) => rows.filter((row, i) => i >= border || i % 2 === 0 || keeps(row));
    const left = half(isRare);
    return left.length <= max ? left : half(() => false);
  };

  const makeStore = () => {
    const callbacks = new Set();
    let [changed, scheduled] = [new Set(), false];
    let rows = new Set(); // ids of rollouts that have changed; null: any may have
    let [offset, logged, lastPoint] = [null, 0, 0];

    const store = {
      ready: false, // until the first frame
      rev: 0,
      t: 0, // unix seconds of the newest frame, by the server's clock
      about: {},
      now: {},
      waits: [],
      servers: [],
      sandbox: null,
      rollouts: new Map(), // id to Row
      groups: new Map(), // id to GroupRow
      steps: [],
      missed: 0, // frames, since the page was opened
      connection: { state: "connecting", error: "", retryMs: null },
      history: new Map(Object.keys(MEASURES).map((name) => [name, []])), // name to [[t, value], ...]
      log: [], // newest first: {id, t, text, kind, href}
      kvShare: () => kvShare(store.servers),
    };

    // `callback(changed, ids)` gets a Set of keys, and one of the rollouts that have changed, come or
    // gone (null: any may have); -> off().
    store.on = (callback) => {
      callbacks.add(callback);
      return () => callbacks.delete(callback);
    };

    store.touch = (...keys) => {
      for (const key of keys) changed.add(key);
      if (scheduled) return;
      scheduled = true;
      requestAnimationFrame(() => {
        const [keys, ids] = [changed, rows];
        [changed, rows, scheduled] = [new Set(), new Set(), false];
        for (const callback of [...callbacks]) {
          try {
            callback(keys, ids);
          } catch (error) {
            console.error(error); // a view that fails must not keep the others from it
          }
        }
      });
    };

    // Milliseconds since the run's t0, by the server's clock as far as it is known.
    store.time = () => {
      const moves = offset !== null && isLive() && store.connection.state === "open";
      const unix = moves ? Date.now() / 1000 + offset : store.t; // nothing grows that nobody tells of
      return 1000 * (unix - (store.about.t0 ?? unix));
    };
    const isLive = () => store.about.live !== false && !api.exported;

    store.say = (text, { kind = "", href = null, t = store.t } = {}) => {
      store.log.unshift({ id: ++logged, t, text, kind, href });
      store.log.length = Math.min(store.log.length, MAX_LOG);
      store.touch("log");
    };

    store.connected = (state, error = "", retryMs = null) => {
      store.connection = { state, error, retryMs };
      store.touch("connection");
    };

    store.apply = (frame) => {
      const before = { about: store.about, now: store.now, servers: store.servers, sandbox: store.sandbox };
      const isFirst = !store.ready;
      [store.ready, store.rev] = [true, frame.rev];
      store.t = frame.t;
      const late = frame.t - Date.now() / 1000;
      offset = offset === null || frame.full ? late : Math.max(late, offset - 0.01); // the fastest one counts
      if (frame.full) {
        store.rollouts.clear();
        rows = null;
        store.groups.clear();
        store.steps = [];
        for (const name of ["now", "servers", "waits", "rollouts", "groups", "steps"]) store.touch(name);
        Object.assign(store, { waits: [], servers: [], now: {}, sandbox: null });
      }
      for (const name of ["about", "now", "waits", "servers", "sandbox"]) {
        if (frame[name] === undefined) continue;
        store[name] = frame[name] ?? (name === "waits" || name === "servers" ? [] : {});
        store.touch(name);
      }
      for (const name of ["rollouts", "groups"]) {
        const [told, gone] = [frame[name] ?? [], frame.gone?.[name] ?? []];
        for (const row of told) store[name].set(row.id, row);
        for (const id of gone) store[name].delete(id);
        if (told.length || gone.length) store.touch(name);
      }
      for (const { id } of frame.rollouts ?? []) rows?.add(id);
      for (const id of frame.gone?.rollouts ?? []) rows?.add(id);
      if (frame.steps?.length) {
        store.steps = thinned(store.steps.concat(frame.steps));
        store.touch("steps");
      }
      if (frame.missed) {
        store.missed += frame.missed;
        store.touch("missed");
      }
      remember();
      if (isFirst) begin();
      else tell(before, frame);
    };

    const remember = () => {
      if (Math.abs(store.t * 1000 - lastPoint) < HISTORY_MS) return;
      lastPoint = store.t * 1000;
      for (const [name, measure] of Object.entries(MEASURES)) {
        const points = store.history.get(name);
        const value = measure(store);
        if (format.isNumber(value)) points.push([store.t, value]);
        if (points.length > MAX_HISTORY) points.splice(0, points.length - MAX_HISTORY);
      }
      store.touch("history");
    };

    // --- the log: what changed, in words --------------------------------------------------------

    const begin = () => {
      const first = store.about.live === false ? 60 : 8;
      for (const row of store.steps.slice(-first)) aboutRow(row, null);
      for (const server of store.servers) if (!server.healthy) aboutServer(server);
    };

    const tell = (before, frame) => {
      const { now, servers, sandbox } = store;
      if (frame.now) {
        const was = before.now;
        if (now.stage && now.stage !== was.stage) store.say(`Now: ${now.stage}`);
        const isNew = now.policy_version && now.policy_version !== was.policy_version;
        if (isNew && store.about.kind !== "train") // there it is every step
          store.say(`Policy version ${now.policy_version}`);
        for (const [name, on, off] of [
          ["paused", "Paused", "Resumed"],
          ["draining", "Draining: no new rollouts start", "No longer draining"],
        ])
          if (Boolean(now[name]) !== Boolean(was[name])) store.say(now[name] ? on : off, { kind: "warn" });
        const refused = (now.refusals ?? 0) - (was.refusals ?? 0);
        if (refused > 0) store.say(`${format.plural(refused, "request")} refused`, { kind: "warn" });
      }
      if (frame.servers) {
        const old = new Map(before.servers.map((one) => [one.url, one]));
        for (const server of servers) {
          if (!old.has(server.url) || old.get(server.url).state !== server.state) aboutServer(server);
          old.delete(server.url);
        }
        for (const url of old.keys()) store.say(`${url} is gone`, { kind: "warn", href: "#/servers" });
      }
      if (frame.sandbox && before.sandbox) {
        const replaced = (sandbox.replaced ?? 0) - (before.sandbox.replaced ?? 0);
        if (replaced > 0)
          store.say(`${format.plural(replaced, "sandbox worker")} replaced`, { kind: "warn", href: "#/sandbox" });
      }
      if (frame.full) return;
      for (const row of frame.steps ?? []) aboutRow(row, store.t);
    };

    const aboutServer = ({ url, state, healthy, reason }) =>
      store.say(`${url} is ${state}${reason ? `: ${reason}` : ""}`, {
        kind: healthy ? "good" : state === "suspect" ? "warn" : "bad",
        href: "#/servers",
      });

    const aboutRow = (row, t) => {
      const parts = [];
      const part = (name, text) => format.isNumber(row[name]) && parts.push(text(row[name]));
      part("held_out/reward", (value) => `held-out reward ${value.toFixed(3)}`);
      part("reward", (value) => `reward ${value.toFixed(3)}`);
      if (!parts.length) part("learner/loss", (value) => `loss ${format.short(value)}`);
      part("tool_errors_in_correct", (value) => `tool errors in correct ${format.percent(value)}`);
      part("step_s", format.span);
      if (parts.length) store.say(`Step ${row.step}: ${parts.join(", ")}`, { t, href: "#/curves" });
    };

    return store;
  };

  /** Whether this is an evaluation, while it goes on or from its folder. */
  const isEvaluation = ({ kind, of }) => kind === "evaluate" || of === "evaluate";

  Object.assign(window.agentloop, { makeStore, thinned, isEvaluation });
})();
