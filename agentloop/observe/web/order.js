// Rollouts in an order that is kept: what a frame costs is what has changed, and one pass over the rest.
(() => {
  "use strict";

  const LIVE_FIRST = 1e12; // more milliseconds than any rollout takes

  // What rows are sorted by, the smallest first. None depends on the clock: of two rollouts in flight
  // the one that began first stays the longer one.
  const KEYS = {
    newest: (row) => -row.start,
    longest: (row) => (row.state === "live" ? row.start - LIVE_FIRST : row.start - (row.end ?? row.start)),
    tokens: (row) => -row.tokens,
  };

  const before = (a, b) => a.key - b.key || (a.id < b.id ? -1 : 1);

  /** Two sorted lists as one. */
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
    /** `rollouts`: id to row, as the store holds them. Read `list` after `take`. */
    constructor(rollouts) {
      this.rollouts = rollouts;
      this.entries = new Map(); // id to {id, row, key, shown}, the same ones as long as they are there
      this.all = []; // entries in order
      this.list = []; // those of them that match
      this.numLive = 0;
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
     * Rows that have changed, come or gone, by their ids; null: any may have.
     * Whether something else is to be listed than before, or elsewhere.
     */
    take(ids) {
      if (ids === null) {
        this.entries.clear();
        [this.all, this.numLive] = [[], 0];
        ids = this.rollouts.keys();
      }
      const keyOf = KEYS[this.name];
      const placed = []; // entries that come, or move
      let [leaves, turns] = [false, false];
      for (const id of ids) {
        const row = this.rollouts.get(id);
        let entry = this.entries.get(id);
        if (entry?.row.state === "live") this.numLive--;
        if (row === undefined) {
          if (entry) leaves = entry.leaves = true;
          this.entries.delete(id);
          continue;
        }
        if (row.state === "live") this.numLive++;
        const [key, shown] = [keyOf(row), this.matches(row)];
        if (!entry) {
          entry = { id, row, key, shown, leaves: false };
          this.entries.set(id, entry);
          placed.push(entry);
        } else if (key !== entry.key) {
          leaves = entry.leaves = true;
          placed.push(entry);
        } else if (shown !== entry.shown) turns = true;
        Object.assign(entry, { row, key, shown });
      }
      if (leaves) this.all = this.all.filter((entry) => !entry.leaves);
      for (const entry of placed) entry.leaves = false;
      if (placed.length) this.all = merged(this.all, placed.sort(before));
      if (leaves || placed.length || turns) this.show();
      return leaves || placed.length > 0 || turns;
    }
  }

  window.agentloop.Order = Order;
})();
