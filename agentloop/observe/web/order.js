// A sorted list of rollouts. An update costs as much as what has changed, plus one pass over the rest.
(() => {
  "use strict";

  const LIVE_FIRST = 1e12; // ms; longer than any rollout

  // Sort keys of rows, smallest first. None depends on the clock: of two rollouts in flight, the one that
  // started first is always the longer one.
  const KEYS = {
    newest: (row) => -row.start,
    longest: (row) => (row.state === "live" ? row.start - LIVE_FIRST : row.start - (row.end ?? row.start)),
    tokens: (row) => -(row.tokens ?? 0),
  };

  /** Whether a rollout is in flight: it has not ended, and does not wait for a session's client. */
  const inFlight = (row) => row.state === "live" && row.lanes?.at(-1)?.[0] !== "client";

  const before = (a, b) => a.key - b.key || (a.id < b.id ? -1 : 1);

  /** Merges two sorted lists. */
  function merged(some, others) {
    const all = new Array(some.length + others.length);
    let [i, j] = [0, 0];
    for (let at = 0; at < all.length; at++) {
      const first = j >= others.length || (i < some.length && before(some[i], others[j]) < 0);
      all[at] = first ? some[i++] : others[j++];
    }
    return all;
  }

  class Order {
    /** `rollouts`: id to row, as in the store. Read `list` after calling `take`. */
    constructor(rollouts) {
      this.rollouts = rollouts;
      this.entries = new Map(); // id to {id, row, key, shown}; an entry keeps its identity
      this.all = []; // all entries, sorted
      this.list = []; // the entries that match the filter
      this.numInFlight = 0;
      this.name = "newest";
      this.matches = () => true;
    }

    sortBy(name) {
      this.name = name;
      for (const entry of this.all) entry.key = KEYS[name](entry.row);
      this.all.sort(before);
      this.show();
    }

    filterBy(matches) {
      this.matches = matches;
      for (const entry of this.all) entry.shown = matches(entry.row);
      this.show();
    }

    show() {
      this.list = this.all.filter((entry) => entry.shown);
    }

    /**
     * Takes the ids of rows that were added, changed or removed (null: any may have changed) and
     * returns whether `list` has changed.
     */
    take(ids) {
      if (ids === null) {
        this.entries.clear();
        [this.all, this.numInFlight] = [[], 0];
        ids = this.rollouts.keys();
      }
      const keyOf = KEYS[this.name];
      const placed = []; // new entries, and those that move
      let [hasRemoved, hasToggled] = [false, false];
      for (const id of ids) {
        const row = this.rollouts.get(id);
        let entry = this.entries.get(id);
        this.numInFlight -= entry?.inFlight ?? 0;
        if (row === undefined) {
          if (entry) hasRemoved = entry.removed = true;
          this.entries.delete(id);
          continue;
        }
        const [key, shown] = [keyOf(row), this.matches(row)];
        this.numInFlight += inFlight(row);
        if (!entry) {
          entry = { id, row, key, shown, removed: false };
          this.entries.set(id, entry);
          placed.push(entry);
        } else if (key !== entry.key) {
          hasRemoved = entry.removed = true;
          placed.push(entry);
        } else if (shown !== entry.shown) hasToggled = true;
        Object.assign(entry, { row, key, shown, inFlight: inFlight(row) });
      }
      if (hasRemoved) this.all = this.all.filter((entry) => !entry.removed);
      for (const entry of placed) entry.removed = false;
      if (placed.length) this.all = merged(this.all, placed.sort(before));
      if (hasRemoved || placed.length || hasToggled) this.show();
      return hasRemoved || placed.length > 0 || hasToggled;
    }
  }

  Order.inFlight = inFlight;
  window.agentloop.Order = Order;
})();
