// The state of the page: merged frames of api/stream, and values derived from them.
//
//     api/stream ──frames──> apply ──> state ──once per animation frame──> views
//                                └──> log (what changed)
//
// Its size is bounded: rollouts and groups are removed when the server removes them, old rows of metrics
// are thinned out, and history and log keep the newest entries.
(() => {
  "use strict";
  const { api, format } = window.agentloop;

  const MAX_STEPS = 5000;
  const MAX_LOG = 200;
  const MAX_HISTORY = 720; // points
  const FAILURES = new Set(["infrastructure", "environment"]); // reasons why a rollout ends that are not the model's

  const kvShare = (servers) => {
    const sum = (name) => servers.reduce((total, one) => total + (one[name] ?? 0), 0);
    const capacity = sum("capacity");
    return capacity ? (sum("held") + sum("reserved")) / capacity : null;
  };

  // Removes every second row of the older ones; rows of evaluations only if that is not enough.
  const thinned = (rows, max = MAX_STEPS) => {
    if (rows.length <= max) return rows;
    const recent = rows.length - Math.floor(max / 5);
    const isRare = (row) => !["reward", "learner/loss", "start/step"].some((name) => name in row);
    const half = (keeps) => rows.filter((row, i) => i >= recent || i % 2 === 0 || keeps(row));
    const left = half(isRare);
    return left.length <= max ? left : half(() => false);
  };

  const makeStore = () => {
    const callbacks = new Set();
    let [changed, scheduled] = [new Set(), false];
    let rows = new Set(); // ids of changed rollouts; null: any may have changed
    let [clockOffset, numLogged] = [null, 0];

    const store = {
      ready: false, // true after the first frame
      rev: 0,
      t: 0, // Unix time of the newest frame, by the server's clock
      about: {},
      now: {},
      waits: [],
      servers: [],
      sandbox: null,
      rollouts: new Map(), // id to Row
      groups: new Map(), // id to GroupRow
      steps: [],
      missed: 0, // frames since the page was opened
      connection: { state: "connecting", error: "", retryMs: null },
      history: new Map(), // name to [[t, value], ...]
      served: new Map(), // URL of a server to [[t, tokens/s, running, held, waiting for a tool, reusable], ...]
      log: [], // newest first: {id, t, text, kind, href}
      kvShare: () => kvShare(store.servers),
    };

    // Calls `callback(changed, ids)` with the Set of changed keys and the Set of ids of rollouts that were
    // added, changed or removed (null: any may have changed). Returns a function that unsubscribes.
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
            console.error(error); // an error in one view must not affect the others
          }
        }
      });
    };

    // Milliseconds since the run's t0, by the estimated server clock.
    store.time = () => {
      const isRunning = clockOffset !== null && isLive() && store.connection.state === "open";
      const unix = isRunning ? Date.now() / 1000 + clockOffset : store.t; // without updates, time stands still
      return 1000 * (unix - (store.about.t0 ?? unix));
    };
    const isLive = () => store.about.live !== false && !api.exported;

    store.addToLog = (text, { kind = "", href = null, t = store.t } = {}) => {
      store.log.unshift({ id: ++numLogged, t, text, kind, href });
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
      const sample = frame.t - Date.now() / 1000;
      clockOffset = clockOffset === null || frame.full ? sample : Math.max(sample, clockOffset - 0.01); // least delayed frame
      if (frame.full) {
        store.rollouts.clear();
        rows = null;
        store.groups.clear();
        store.steps = [];
        store.history.clear();
        store.served.clear();
        for (const name of ["now", "servers", "waits", "rollouts", "groups", "steps", "history"]) store.touch(name);
        Object.assign(store, { waits: [], servers: [], now: {}, sandbox: null });
      }
      for (const name of ["about", "now", "waits", "servers", "sandbox"]) {
        if (frame[name] === undefined) continue;
        store[name] = frame[name] ?? (name === "waits" || name === "servers" ? [] : {});
        store.touch(name);
      }
      for (const name of ["rollouts", "groups"]) {
        const [updated, removed] = [frame[name] ?? [], frame.gone?.[name] ?? []];
        if (name === "rollouts" && !frame.full) logFailures(updated);
        for (const row of updated) store[name].set(row.id, row);
        for (const id of removed) store[name].delete(id);
        if (updated.length || removed.length) store.touch(name);
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
      for (const point of frame.history ?? []) addToHistory(point);
      if (isFirst) logInitialState();
      else logChanges(before, frame);
    };

    // Points of the last hour, which the server keeps: [[t, value], ...] by name, [[t, ...values], ...] by server.
    const addToHistory = ({ t, now, servers }) => {
      const add = (map, name, point) => {
        if (!map.has(name)) map.set(name, []);
        const points = map.get(name);
        points.push(point);
        if (points.length > MAX_HISTORY) points.shift();
      };
      for (const [name, value] of Object.entries(now)) add(store.history, name, [t, value]);
      for (const [url, values] of Object.entries(servers)) add(store.served, url, [t, ...values]);
      const capacity = store.servers.reduce((total, one) => total + (one.capacity ?? 0), 0);
      const held = Object.values(servers).reduce((total, [, , one]) => total + one, 0);
      if (capacity) add(store.history, "kv", [t, held / capacity]);
      store.touch("history");
    };

    // --- the log of changes ---------------------------------------------------------------------

    const logInitialState = () => {
      const first = store.about.live === false ? 60 : 8;
      for (const row of store.steps.slice(-first)) logRow(row, row.unix_s ?? null);
      for (const server of store.servers) if (!server.healthy) logServer(server);
      logRaised([]);
    };

    const logRaised = (before) => {
      for (const text of store.now.raised ?? []) if (!before.includes(text)) store.addToLog(text, { kind: "warn" });
    };

    const logChanges = (before, frame) => {
      const { now, servers, sandbox } = store;
      if (frame.now) {
        const was = before.now;
        if (now.stage && now.stage !== was.stage) store.addToLog(format.capitalized(now.stage));
        const isNew = now.policy_version && now.policy_version !== was.policy_version;
        if (isNew && store.about.kind !== "train") // where it changes with every step
          store.addToLog(`Policy version ${now.policy_version}`);
        for (const [name, on, off] of [
          ["paused", "Paused", "Resumed"],
          ["draining", "Draining: no new groups are started", "No longer draining"],
        ])
          if (Boolean(now[name]) !== Boolean(was[name])) store.addToLog(now[name] ? on : off, { kind: "warn" });
        logRaised(was.raised ?? []);
        const refused = (now.refusals ?? 0) - (was.refusals ?? 0);
        if (refused > 0) store.addToLog(`${format.plural(refused, "request")} refused`, { kind: "warn" });
      }
      if (frame.servers) {
        const previous = new Map(before.servers.map((one) => [one.url, one]));
        for (const server of servers) {
          const states = [previous.get(server.url)?.state, server.state];
          if (states[0] !== states[1] && !states.includes("stale")) logServer(server); // stale: until a weight sync ends
          previous.delete(server.url);
        }
        for (const url of previous.keys()) store.addToLog(`${url} was removed`, { kind: "warn", href: "#/servers" });
      }
      if (frame.sandbox && before.sandbox) {
        const lost = (sandbox.lost ?? 0) - (before.sandbox.lost ?? 0);
        if (lost > 0)
          store.addToLog(`${format.plural(lost, "sandbox worker")} lost and replaced`, { kind: "warn", href: "#/sandbox" });
      }
      if (frame.full) return;
      for (const row of frame.steps ?? []) logRow(row, row.unix_s ?? store.t);
    };

    // One line for those that failed for the same reason at the same time.
    const logFailures = (rows) => {
      const failures = new Map();
      for (const { id, state, stop } of rows) {
        const reason = state === "abandoned" ? "cancelled" : FAILURES.has(stop) ? `failed: ${stop}` : null;
        if (reason && store.rollouts.get(id)?.state === "live") failures.set(reason, [...(failures.get(reason) ?? []), id]);
      }
      for (const [reason, [id, ...others]] of failures) {
        const text = `Rollout ${id}${others.length ? ` and ${format.plural(others.length, "other")}` : ""} ${reason}`;
        store.addToLog(text, { kind: "warn", href: `#/rollout/${encodeURIComponent(id)}` });
      }
    };

    const logServer = ({ url, state, healthy, reason }) =>
      store.addToLog(`${url} is ${state}${reason ? `: ${reason}` : ""}`, {
        kind: healthy ? "good" : state === "suspect" ? "warn" : "bad",
        href: "#/servers",
      });

    const logRow = (row, t) => {
      const parts = [];
      const part = (name, text) => format.isNumber(row[name]) && parts.push(text(row[name]));
      part("held_out/reward", (value) => `held-out reward ${value.toFixed(3)}`);
      part("reward", (value) => `reward ${value.toFixed(3)}`);
      if (!parts.length) part("learner/loss", (value) => `loss ${format.short(value)}`);
      part("tool_errors_in_correct", (value) => `tool errors in correct rollouts ${format.percent(value)}`);
      part("step_s", (value) => `took ${format.span(value)}`);
      if (parts.length) store.addToLog(`${isEvaluation(store.about) ? "Task" : "Step"} ${row.step}: ${parts.join(", ")}`, { t, href: "#/curves" });
    };

    return store;
  };

  /** True for an evaluation, live or read from its folder. */
  const isEvaluation = ({ kind, of }) => kind === "evaluate" || of === "evaluate";

  Object.assign(window.agentloop, { makeStore, thinned, isEvaluation });
})();
