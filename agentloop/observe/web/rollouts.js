// The views of all rollouts, with a row and a timeline for each, and of all groups, as a table.
//
// Rows outside the viewport are not rendered. Every change (of the store, scroll position, zoom or clock)
// requests an animation frame, which draws the differences. It does not read the layout: sizes are
// measured when they change.
//
//     store ──ids──> Order ──> items (entries, headers) ──visible ones──> slots, canvas
(() => {
  "use strict";
  const { h, setText, setAttr, format, parts, api, download, Order } = window.agentloop;

  const OVERSCAN = 6; // rows rendered beyond each edge, to avoid gaps while scrolling
  const TICK_MS = 250; // how often the time axis is updated
  const SCROLL_END_MS = 300; // time after scrolling at which the elements are sorted
  const SPANS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800];
  const AHEAD = 0.03; // fraction of the window to the right of the current time
  const MIN_SPAN_S = 30; // minimum initial time span of a live run
  const MARK_PX = 11; // width of the mark at the end of a row
  const DRAG_PX = 4; // a smaller movement of the pointer is a click

  const ORDERS = [["newest", "Newest"], ["longest", "Longest duration"], ["tokens", "Most tokens"]];
  const STATES = [["all", "All"], ["live", "In flight"], ["done", "Done"], ["failed", "Failed"], ["errors", "With failed calls"]];
  const REWARDS = [["all", "All"], ["correct", "Correct"], ["incorrect", "Incorrect"], ["none", "Not scored"]];
  const COLUMNS = [
    ["id", "Rollout"], ["question", "Question"], ["turn", "Turn"], ["tokens", "Tokens"], ["calls", "Calls"], ["reward", "Reward"],
    ["answer", "Answer"], ["expected", "Expected"], ["time", "Time"], ["lanes", "Timeline"],
  ];

  // The reader's choices are kept when the view is closed, so that they apply again after visiting a rollout.
  const chosen = { query: "", state: "all", reward: "all", order: "newest", grouped: false, aligned: null, span: 120, top: 0 };

  window.agentloop.view("rollouts", {
    title: "Rollouts",
    mount(root, params, app) {
      chosen.state = params.query.get("state") ?? chosen.state;
      const view = new Rollouts(root, app);
      return () => view.close();
    },
  });

  class Rollouts {
    constructor(root, app) {
      this.app = app;
      this.now = app.time;
      this.order = new Order(app.store.rollouts);
      this.items = []; // the rows of the list: entries of the order and, if grouped, headers
      this.slots = []; // elements of rows; a row uses the one at its index modulo their number
      this.top = 0; // scroll position
      this.active = null; // id of the selected rollout (or "group:ID")
      this.follow = true;
      this.from = 0; // left edge in ms, if the view does not follow the current time
      this.t = 0; // the time that is drawn
      this.changed = null; // ids of changed rollouts; null: any may have changed
      this.stale = true; // the filter or the order has changed
      this.version = 0; // of the content of the rows
      this.asked = 0;
      this.colors = parts.colors();
      this.build(root);
      this.off = app.store.on((changed, ids) => {
        if (changed.has("theme")) {
          this.colors = parts.colors();
          this.drawn = "";
        }
        if (ids === null) this.changed = null;
        else for (const id of ids) this.changed?.add(id);
        if (changed.has("groups")) {
          // Groups have the questions of their rollouts, and may arrive after them.
          for (const slot of this.slots) slot.content = null;
          this.stale ||= chosen.query !== "";
        }
        if (["rollouts", "groups", "about", "theme"].some((key) => changed.has(key))) this.ask();
      });
      this.sizes = new ResizeObserver(() => this.measure());
      this.sizes.observe(this.scroll);
      this.onResize = () => this.fillWindow();
      window.addEventListener("resize", this.onResize);
      this.timer = setInterval(() => {
        if (this.live && !document.hidden) this.ask();
      }, TICK_MS);
      this.fillWindow();
      this.refresh();
      this.scroll.scrollTop = this.top = chosen.top;
    }

    /** Sets the initial time axis once there is data: a finished run starts with aligned rollouts. */
    begin() {
      this.hasBegun = true;
      chosen.aligned ??= !this.live;
      this.alignBox.firstChild.checked = chosen.aligned;
      this.fitting = !this.live;
      this.fitAll();
      if (this.follow && this.live) chosen.span = Math.max(chosen.span, MIN_SPAN_S);
    }

    get live() {
      return this.app.store.about.live ?? false;
    }

    close() {
      chosen.top = this.top;
      clearTimeout(this.scrollTimer);
      this.off();
      this.sizes.disconnect();
      window.removeEventListener("resize", this.onResize);
      clearInterval(this.timer);
      cancelAnimationFrame(this.asked);
    }

    // -- elements

    /** Downloads all timelines; a link could not send the token that the server may require. */
    async saveTrace() {
      try {
        const text = JSON.stringify(await api.get("api/trace"));
        download(`${this.app.store.about.title || "agentloop"}.perfetto.json`, "application/json", text);
      } catch (error) {
        setText(this.readout, `Not saved: ${error.message}`);
      }
    }

    build(root) {
      const filter = (name) => (value) => {
        chosen[name] = value;
        this.stale = this.refit = true;
        this.ask();
      };
      this.found = h("p", { class: "ro-found" });
      this.spanText = h("output", { class: "ro-span" });
      this.followButton = h(
        "button", { type: "button", class: "v-button", "aria-pressed": "true", onclick: () => this.setFollow(!this.follow) },
        "Follow",
      );
      this.alignBox = parts.check("Align start times", chosen.aligned ?? false, (on) => {
        chosen.aligned = on;
        this.follow = !on && this.live;
        this.fitAll();
        this.ask();
      });
      const save = api.exported
        ? null
        : h("button", { type: "button", class: "v-button", title: "Download all timelines; ui.perfetto.dev opens the file", onclick: () => this.saveTrace() }, "Save for Perfetto");
      const bar = h(
        "div", { class: "v-bar" },
        parts.search("question, id, group, answer", chosen.query, filter("query")),
        parts.choice("State", STATES, chosen.state, filter("state")),
        parts.choice("Reward", REWARDS, chosen.reward, filter("reward")),
        parts.choice("Sort by", ORDERS, chosen.order, filter("order")),
        parts.check("Show by group", chosen.grouped, filter("grouped")),
        this.alignBox,
        h(
          "div", { class: "v-cluster", role: "group", "aria-label": "Time axis" },
          parts.button("−", "Zoom out", () => this.zoom(1)),
          this.spanText,
          parts.button("+", "Zoom in", () => this.zoom(-1)),
          parts.button("Fit", "Fit to the visible rows", () => this.fitAll()),
          parts.button("‹", "Earlier", () => this.pan(-0.5)),
          parts.button("›", "Later", () => this.pan(0.5)),
          this.followButton,
        ),
      );
      this.axis = h("canvas", { class: "ro-axis", "aria-hidden": "true" });
      const headers = COLUMNS.map(([name, text]) =>
        h("div", { class: `ro-cell ro-${name}`, role: "columnheader" }, h("span", null, text), name === "lanes" ? this.axis : null),
      );
      this.head = h("div", { class: "ro-head", role: "rowgroup" }, h("div", { class: "ro-row", role: "row", "aria-rowindex": 1 }, headers));
      this.canvas = h("canvas", { class: "ro-canvas", "aria-hidden": "true" });
      this.body = h("div", { class: "ro-body", role: "rowgroup" });
      this.space = h("div", { class: "ro-space" }, this.canvas, this.body);
      this.scroll = h(
        "div",
        {
          class: "ro-scroll", role: "grid", tabindex: "0", "aria-label": "Rollouts", "aria-readonly": "true",
          "aria-colcount": COLUMNS.length, "aria-describedby": "ro-keys",
          onkeydown: (event) => this.key(event), onscroll: () => this.scrolled(),
        },
        this.head, this.space,
      );
      this.scroll.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      this.pointers();
      this.empty = h("p", { class: "v-empty", hidden: true });
      this.readout = h("p", { class: "ro-readout" });
      root.append(
        h(
          "section", { class: `v ro${this.app.store.about.kind === "serve" ? " unscored" : ""}` }, bar,
          h("div", { class: "ro-under" }, parts.legend(), this.found, save),
          h("p", { class: "v-hidden", id: "ro-keys" },
            "Press the up and down arrow keys to select a rollout and Enter to open it, the left and right arrow keys to move in time, plus and minus to zoom, and F to follow the current time."),
          h("div", { class: "ro-panel" }, this.scroll, this.empty, this.readout),
        ),
      );
      this.root = root;
    }

    /** The list fills the rest of the window, so that the page itself need not scroll. */
    fillWindow() {
      const top = this.scroll.getBoundingClientRect().top + window.scrollY;
      const left = window.innerHeight - top - 64;
      this.scroll.style.height = `${Math.max(left, 320)}px`;
      this.measure();
    }

    measure() {
      const style = getComputedStyle(this.scroll);
      const px = (name) => parseFloat(style.getPropertyValue(name)) || 0;
      const box = this.head.querySelector(".ro-lanes");
      this.rowHeight = px("--ro-row");
      this.stripTop = px("--ro-strip-top");
      this.stripHeight = px("--ro-strip");
      this.left = box.offsetLeft;
      this.width = Math.max(box.offsetWidth, 40);
      this.axisHeight = box.clientHeight;
      this.height = this.scroll.clientHeight - this.head.offsetHeight;
      this.capacity = Math.ceil(this.height / this.rowHeight) + 1 + 2 * OVERSCAN;
      this.resized = true;
      this.ask();
    }

    scrolled() {
      this.top = this.scroll.scrollTop;
      clearTimeout(this.scrollTimer);
      this.scrollTimer = setTimeout(() => this.sortElements(), SCROLL_END_MS);
      this.ask();
    }

    ask() {
      this.asked ||= requestAnimationFrame(() => {
        this.asked = 0;
        if (this.stale || this.changed === null || this.changed.size) this.refresh();
        if (!this.hasBegun && this.app.store.ready && this.items.length) this.begin();
        this.draw();
      });
    }

    // -- the list of rows

    refresh() {
      const { order } = this;
      let moved = this.stale;
      if (this.stale) {
        order.filterBy((row) => matches(row, this.questionOf(row), this.expectedOf(row)));
        if (order.name !== chosen.order) order.sortBy(chosen.order);
      }
      moved = order.take(this.changed) || moved;
      [this.stale, this.changed] = [false, new Set()];
      this.version++;
      this.t = this.now();
      if (moved) this.relist();
      if (moved && this.refit) this.follow = this.live && !chosen.aligned && order.list.some(({ row }) => row.state === "live");
      if (moved && (this.fitting || (this.refit && !this.follow))) this.fitAll(); // a finished run arrives in several frames
      this.refit = false;
      const all = order.all.length;
      const shown = order.list.length === all ? "" : `${format.whole(order.list.length)} of `;
      setText(this.found, `${shown}${format.plural(all, "rollout")}, ${format.whole(order.numInFlight)} in flight`);
    }

    relist() {
      const { order } = this;
      // If the reader has scrolled down or points at a row, the visible rows stay in position when rows are added above. Not
      // when sorted by tokens: the reader of a ranking looks at the positions.
      const at = Math.floor(this.top / this.rowHeight);
      const anchor = (at > 0 || this.hover) && chosen.order !== "tokens" ? this.items[at] : null;
      this.items = chosen.grouped ? byGroup(order.list) : order.list;
      setAttr(this.scroll, "aria-rowcount", this.items.length + 1);
      const height = this.items.length * this.rowHeight;
      this.space.style.height = `${height}px`;
      const index = anchor ? this.indexOf(anchor.id) : -1;
      const top = index < 0 ? this.top : this.top + (index - at) * this.rowHeight;
      const clamped = Math.max(0, Math.min(top, height - this.height));
      if (index >= 0 && clamped !== this.top) this.scroll.scrollTop = clamped;
      this.top = clamped;
      this.empty.hidden = this.items.length > 0;
      setText(this.empty, order.all.length ? "No matching rollouts." : "No rollouts yet.");
    }

    indexOf(id) {
      return id === null ? -1 : this.items.findIndex((item) => item.id === id);
    }

    // -- one frame

    draw() {
      if (!this.rowHeight) return;
      const now = this.now();
      if (now - this.t >= TICK_MS || now < this.t) this.t = now;
      const span = chosen.span * 1000;
      if (this.follow && this.live && !chosen.aligned) this.from = this.t - span * (1 - AHEAD);
      this.scale = this.width / span;
      const first = Math.max(0, Math.floor(this.top / this.rowHeight) - OVERSCAN);
      const last = Math.min(this.items.length, first + this.capacity);
      this.assignSlots(first, last);
      const axis = [this.t, this.from, span, this.width, chosen.aligned, this.live].join();
      const drawn = [axis, first, last, this.version, this.capacity].join();
      if (drawn !== this.drawn) this.paint(first, last);
      if (axis !== this.axisDrawn || !this.drawn) this.paintAxis();
      [this.drawn, this.axisDrawn] = [drawn, axis];
      setText(this.spanText, format.span(chosen.span));
      setAttr(this.followButton, "aria-pressed", String(this.follow));
      setAttr(this.followButton, "hidden", chosen.aligned || !this.live);
      this.showDetails();
    }

    /** Assigns elements, which are reused, to the rows from `first` to `last`. */
    assignSlots(first, last) {
      const { slots, capacity } = this;
      if (slots.length !== capacity || this.resized) {
        this.resized = false;
        this.drawn = "";
        while (slots.length > capacity) slots.pop().node.remove();
        while (slots.length < capacity) {
          const slot = makeSlot();
          slots.push(slot);
          this.body.append(slot.node);
        }
        for (const slot of slots) slot.index = -1;
        this.space.style.height = `${this.items.length * this.rowHeight}px`;
      }
      let active = null;
      for (let index = first; index < first + capacity; index++) {
        const slot = slots[index % capacity];
        if (index >= last) {
          if (slot.index >= 0 || !slot.node.hidden) clear(slot);
          continue;
        }
        this.fill(slot, index);
        if (slot.item.id === this.active) active = slot.node.id;
      }
      setAttr(this.scroll, "aria-activedescendant", active);
    }

    fill(slot, index) {
      const item = this.items[index];
      if (slot.index !== index) {
        if (slot.node.hidden) slot.node.hidden = false;
        slot.index = index;
        slot.node.style.transform = `translateY(${index * this.rowHeight}px)`;
        slot.node.setAttribute("aria-rowindex", index + 2);
      }
      const active = item.id === this.active;
      if (slot.active !== active) {
        slot.active = active;
        slot.node.classList.toggle("active", active);
        slot.node.setAttribute("aria-selected", String(active));
      }
      const content = item.header ? this.version : item.row;
      if (slot.item !== item || slot.content !== content) {
        [slot.item, slot.content, slot.t] = [item, content, null];
        if (item.header) fillHeader(slot, item, this.app.store.groups.get(item.group));
        else fillRow(slot, item.row, this.questionOf(item.row), this.expectedOf(item.row));
      }
      if (!item.header && slot.t !== this.t) {
        slot.t = this.t;
        slot.write("time", format.span(((item.row.end ?? this.t) - item.row.start) / 1000));
      }
    }

    /** The first words of a rollout's question: its group's, or its own if it has no group here. */
    questionOf(row) {
      return this.app.store.groups.get(row.group)?.question || row.question || "";
    }

    expectedOf(row) {
      return this.app.store.groups.get(row.group)?.answer ?? "";
    }

    /** Sorts the elements by index, for screen readers. */
    sortElements() {
      const used = this.slots.filter((slot) => slot.index >= 0).sort((a, b) => a.index - b.index);
      used.forEach(({ node }, i) => {
        if (this.body.children[i] !== node) this.body.insertBefore(node, this.body.children[i]);
      });
    }

    /** Draws the timelines. The canvas is positioned at its rows, so it scrolls with them until it is redrawn. */
    paint(first, last) {
      const { rowHeight, stripTop, stripHeight } = this;
      const context = parts.fit(this.canvas, this.width, this.capacity * rowHeight);
      this.canvas.style.transform = `translate(${this.left}px, ${first * rowHeight}px)`;
      const colors = this.colors;
      const height = (last - first) * rowHeight;
      // If timelines are below the text of their rows, grid lines must not cross the text.
      const bands = stripTop < stripHeight ? [[0, height]] : Array.from({ length: last - first }, (_, i) => [i * rowHeight + stripTop - 2, stripHeight + 4]);
      const line = (x) => {
        for (const [top, length] of bands) context.fillRect(Math.round(x), top, 1, length);
      };
      context.fillStyle = colors.line;
      for (const tick of this.ticks()) line(tick.x);
      for (let index = first; index < last; index++) {
        const item = this.items[index];
        if (!item.header) this.paintRow(context, item.row, (index - first) * rowHeight + stripTop, stripHeight, colors);
      }
      if (!chosen.aligned) {
        const x = (this.t - this.from) * this.scale;
        context.fillStyle = colors.accent;
        if (this.live && x <= this.width) line(x);
      }
    }

    paintRow(context, row, top, height, colors) {
      const base = chosen.aligned ? row.start : 0;
      const x = (ms) => (ms - base - this.from) * this.scale;
      const end = x(row.end ?? this.t);
      const begin = x(row.start);
      const middle = top + height / 2;
      if (end < 0 || begin > this.width) {
        context.fillStyle = colors.muted;
        context.font = "11px system-ui, sans-serif";
        context.textBaseline = "middle";
        context.textAlign = end < 0 ? "left" : "right";
        context.fillText(end < 0 ? "‹ earlier" : "later ›", end < 0 ? 4 : this.width - 4, middle);
        return;
      }
      if (row.more) {
        context.fillStyle = colors.muted; // lanes that the server omitted
        for (let at = Math.max(begin, 0); at < Math.min(x(row.lanes?.[0]?.[1] ?? row.start), this.width); at += 6) {
          context.fillRect(at, middle - 0.5, 3, 1);
        }
      }
      const lanes = row.lanes ?? [];
      for (let i = 0; i < lanes.length; i++) {
        const lane = lanes[i][0];
        const left = Math.max(x(lanes[i][1]), 0);
        const right = Math.min(i + 1 < lanes.length ? x(lanes[i + 1][1]) : end, this.width);
        if (right < 0 || left > this.width) continue;
        const [shift, share] = parts.SHAPES[lane] ?? parts.SHAPES.decode;
        context.fillStyle = colors[`lane-${lane}`] ?? colors.muted;
        context.fillRect(left, top + shift * height, Math.max(right - left, 0.75), share * height);
      }
      if (row.end !== null && row.end !== undefined && end <= this.width) {
        paintEnd(context, row, Math.min(end + 4, this.width - MARK_PX), middle, colors);
      }
    }

    paintAxis() {
      const height = this.axisHeight;
      const context = parts.fit(this.axis, this.width, height);
      const colors = this.colors;
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "alphabetic";
      for (const tick of this.ticks()) {
        context.fillStyle = colors.line;
        context.fillRect(Math.round(tick.x), height - 5, 1, 5);
        context.fillStyle = colors.muted;
        const width = context.measureText(tick.text).width;
        if (tick.x + 3 + width < this.width) context.fillText(tick.text, tick.x + 3, height - 6);
      }
    }

    /** Ticks at round times, about 90 pixels apart. */
    ticks() {
      const span = chosen.span * 1000;
      const step = (SPANS_S.find((s) => (s / chosen.span) * this.width >= 90) ?? 172800) * 1000;
      const t0 = chosen.aligned ? 0 : (this.app.store.about.t0 ?? 0) * 1000;
      const zone = chosen.aligned ? 0 : new Date().getTimezoneOffset() * 60000; // hours are in local time
      const found = [];
      for (let at = Math.ceil((t0 - zone + this.from) / step) * step + zone; at <= t0 + this.from + span; at += step) {
        const text = chosen.aligned ? format.span(at / 1000) : timeOfDay(at, step);
        found.push({ x: (at - t0 - this.from) * this.scale, text: at === 0 && chosen.aligned ? "0" : text });
      }
      return found;
    }

    // -- time

    setFollow(on) {
      this.follow = on && this.live;
      this.ask();
    }

    /** Zooms by one step around `share` of the window, by default the current time if it is followed. */
    zoom(by, share = this.follow ? 1 - AHEAD : 0.5) {
      this.fitting = false;
      const at = SPANS_S.findIndex((s) => s >= chosen.span);
      const next = SPANS_S[Math.min(Math.max(at + by, 0), SPANS_S.length - 1)];
      if (chosen.aligned) share = 0;
      this.from += (chosen.span - next) * 1000 * share;
      chosen.span = next;
      this.ask();
    }

    pan(share) {
      this.follow = this.fitting = false;
      this.from += share * chosen.span * 1000;
      if (chosen.aligned) this.from = Math.max(this.from, 0);
      this.ask();
    }

    /** Chooses the shortest time span that contains the visible rows. */
    fitAll() {
      const at = Math.floor(this.top / this.rowHeight) || 0;
      const shown = this.items.slice(at, at + Math.ceil(this.height / this.rowHeight || 40));
      const within = shown.filter((item) => !item.header).map((item) => item.row);
      if (!within.length) return;
      const now = this.now();
      const ends = within.map((row) => row.end ?? now);
      const [low, high] = chosen.aligned
        ? [0, Math.max(...within.map((row, i) => ends[i] - row.start))]
        : [Math.min(...within.map((row) => row.start)), this.follow ? now : Math.max(...ends)];
      const wanted = ((high - low) / 1000) * (1 + 2 * AHEAD);
      chosen.span = SPANS_S.find((s) => s >= wanted) ?? SPANS_S.at(-1);
      this.from = chosen.aligned ? 0 : low - (chosen.span * 1000 - (high - low)) / 2;
      this.ask();
    }

    // -- keyboard and pointer

    key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const page = Math.max(1, Math.floor(this.height / this.rowHeight) - 1);
      const here = this.indexOf(this.active);
      const steps = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: this.items.length - 1 };
      const acts = {
        ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), "+": () => this.zoom(-1), "=": () => this.zoom(-1),
        "-": () => this.zoom(1), f: () => this.setFollow(!this.follow), Enter: () => this.open(this.items[here]),
      };
      if (event.key in steps && this.items.length) {
        const to = Math.min(Math.max(steps[event.key], 0), this.items.length - 1);
        this.active = this.items[to].id;
        this.reveal(to);
      } else if (event.key in acts) acts[event.key]();
      else return;
      event.preventDefault();
      this.ask();
    }

    reveal(index) {
      const top = index * this.rowHeight;
      const to = Math.max(Math.min(this.top, top), top + this.rowHeight - this.height);
      if (to !== this.top) this.scroll.scrollTop = this.top = to;
    }

    open(item) {
      if (!item) return;
      const [kind, id] = item.header ? ["group", item.group] : ["rollout", item.id];
      if (id && (kind === "rollout" || this.app.store.groups.has(id))) this.app.go(parts.hash(kind, id));
    }

    wheel(event) {
      if (event.ctrlKey) {
        const box = this.canvas.getBoundingClientRect();
        this.zoom(Math.sign(event.deltaY), Math.min(Math.max((event.clientX - box.left) / this.width, 0), 1));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        this.pan((event.deltaX || event.deltaY) / this.width);
      } else return;
      event.preventDefault();
    }

    pointers() {
      let drag = null;
      const itemAt = (event) => this.slots.find((slot) => slot.node.contains(event.target))?.item;
      this.space.addEventListener("pointerdown", (event) => {
        if (event.button === 0) drag = { x: event.clientX, y: event.clientY, from: this.from, item: itemAt(event), moved: false };
      });
      this.space.addEventListener("pointermove", (event) => {
        this.hover = { item: itemAt(event), x: event.clientX - this.scroll.getBoundingClientRect().left - this.left };
        if (drag && (drag.moved || Math.abs(event.clientX - drag.x) > DRAG_PX)) {
          if (!drag.moved) this.space.setPointerCapture(event.pointerId);
          drag.moved = true;
          this.follow = this.fitting = false;
          this.from = drag.from - (event.clientX - drag.x) / this.scale;
          if (chosen.aligned) this.from = Math.max(this.from, 0);
        }
        this.ask();
      });
      const done = () => {
        this.dragged = drag?.moved ?? false;
        drag = null;
      };
      this.space.addEventListener("pointerup", done);
      this.space.addEventListener("pointercancel", done);
      this.space.addEventListener("pointerleave", () => {
        this.hover = null;
        this.ask();
      });
      this.space.addEventListener("click", (event) => {
        if (event.target.closest("a") || this.dragged) {
          if (this.dragged) event.preventDefault();
          return;
        }
        this.open(itemAt(event));
      });
    }

    /** Shows details of the lane at the pointer, or of the selected rollout. */
    showDetails() {
      const pointed = this.hover?.item ?? this.slots.find((slot) => slot.item && slot.item.id === this.active)?.item;
      if (!pointed || pointed.header) {
        setText(this.readout, pointed ? `group ${pointed.group || "–"}` : "Point at a timeline or use the arrow keys to see details. Ctrl and the wheel zoom, dragging moves.");
        return;
      }
      const item = pointed.row;
      const details = [item.id, item.stop ? parts.words(item.stop) : parts.stateText(item.state)];
      const question = this.questionOf(item);
      if (question) details.push(question);
      if (item.server) details.push(item.server);
      const base = chosen.aligned ? item.start : 0;
      const at = this.hover ? this.from + this.hover.x / this.scale + base : null;
      const lane = at !== null && parts.spans(item, this.t).find(([, from, to]) => from <= at && at < to);
      if (lane && this.hover.x >= 0) {
        const [name, from, to] = lane;
        details.push(`${parts.laneLabel(name)} ${format.span((to - from) / 1000)}, from ${format.span((from - item.start) / 1000)} after the start`);
      } else details.push(parts.lanesText(item, this.t));
      setText(this.readout, details.join(" · "));
    }
  }

  // -- rows

  function matches(row, question, expected) {
    if (chosen.state === "live" && !Order.inFlight(row)) return false;
    if (chosen.state === "errors" ? !row.failed_calls : chosen.state !== "all" && parts.stateOf(row) !== chosen.state) return false;
    if (chosen.reward !== "all" && parts.rewardOf(row) !== chosen.reward) return false;
    if (!chosen.query) return true;
    return [question, row.id, row.group, row.answer, expected].some((text) => (text ?? "").toLowerCase().includes(chosen.query));
  }

  /** Returns headers and rows; groups are in the order of their first rows. */
  function byGroup(entries) {
    const groups = new Map();
    for (const entry of entries) {
      const group = entry.row.group ?? "";
      const members = groups.get(group);
      if (members) members.push(entry);
      else groups.set(group, [entry]);
    }
    const items = [];
    for (const [group, members] of groups) items.push({ id: `group:${group}`, header: true, group, members }, ...members);
    return items;
  }

  let made = 0;

  function makeSlot() {
    const cells = {};
    const node = h("div", { class: "ro-row", role: "row", id: `ro-row-${made++}` });
    for (const [name] of COLUMNS) {
      cells[name] = h("div", { class: `ro-cell ro-${name}`, role: "gridcell" });
      node.append(cells[name]);
    }
    const link = h("a", { tabindex: "-1" });
    const mark = h("span", { class: "ro-mark", "aria-hidden": "true" });
    const lanes = h("span", { class: "v-hidden" });
    const texts = { id: new Text(), lanes: new Text() };
    for (const name of ["question", "turn", "tokens", "calls", "reward", "answer", "expected", "time"]) cells[name].append((texts[name] = new Text()));
    link.append(texts.id);
    lanes.append(texts.lanes);
    cells.id.append(mark, link);
    cells.lanes.append(lanes);
    const write = (name, text) => {
      if (texts[name].data !== text) texts[name].data = text;
    };
    return { node, cells, link, mark, write, item: null, content: null, index: -1 };
  }

  function clear(slot) {
    slot.node.hidden = true;
    slot.index = -1;
    slot.item = slot.content = null;
  }

  function fillRow(slot, row, question, expected) {
    const { cells, write } = slot;
    const state = parts.stateOf(row);
    const reward = parts.rewardOf(row);
    const failed = row.failed_calls ? `${row.failed_calls} of ${row.calls} calls failed` : "";
    setClass(slot.node, slot.active ? "ro-row active" : "ro-row");
    setClass(slot.mark, `ro-mark ${state}`);
    setClass(cells.reward, `ro-cell ro-reward v-reward ${reward}`);
    setClass(cells.calls, failed ? "ro-cell ro-calls v-bad" : "ro-cell ro-calls");
    setAttr(slot.link, "href", parts.hash("rollout", row.id));
    setAttr(slot.link, "title", row.id);
    setAttr(cells.calls, "title", failed || null);
    write("id", row.id);
    write("question", question);
    setAttr(cells.question, "title", question || null);
    write("turn", format.whole(row.turn));
    write("tokens", format.whole(row.tokens));
    write("calls", row.failed_calls ? `${row.calls} (${row.failed_calls} ✗)` : format.whole(row.calls));
    write("reward", parts.rewardText(row));
    write("answer", row.answer || (state === "done" ? "" : parts.stateText(state)));
    setAttr(cells.answer, "title", row.answer || null);
    write("expected", expected);
    setAttr(cells.expected, "title", expected || null);
    write("lanes", parts.lanesText(row, row.end ?? row.lanes?.at(-1)?.[1] ?? row.start));
  }

  /** `known`: the group's row in the store, which also covers members that are hidden here. */
  function fillHeader(slot, { group, members }, known) {
    const { cells, write } = slot;
    let [tokens, calls, live, scored, sum] = [0, 0, 0, 0, 0];
    for (const { row } of members) {
      tokens += row.tokens ?? 0;
      calls += row.calls;
      live += Order.inFlight(row);
      if (parts.rewardOf(row) === "none") continue;
      scored++;
      sum += row.reward;
    }
    setClass(slot.node, slot.active ? "ro-row header active" : "ro-row header");
    setClass(slot.mark, "ro-mark");
    setClass(cells.reward, "ro-cell ro-reward");
    setClass(cells.calls, "ro-cell ro-calls");
    setAttr(slot.link, "href", known ? parts.hash("group", group) : null);
    setAttr(slot.link, "title", group || null);
    setAttr(cells.calls, "title", null);
    write("id", group || "no group");
    write("turn", "");
    write("tokens", format.whole(tokens));
    write("calls", format.whole(calls));
    const mean = known ? known.mean_reward : sum / scored;
    write("reward", format.isNumber(mean) ? `mean ${mean.toFixed(2)}` : "");
    write("question", known?.question ?? "");
    setAttr(cells.question, "title", known?.question || null);
    write("answer", "");
    setAttr(cells.answer, "title", null);
    write("expected", known?.answer ?? "");
    setAttr(cells.expected, "title", known?.answer || null);
    write("time", "");
    write("lanes", `${format.plural(members.length, "rollout")}, ${live} in flight`);
  }

  function setClass(node, name) {
    if (node.className !== name) node.className = name;
  }

  function paintEnd(context, row, x, middle, colors) {
    const kind = parts.stateOf(row) === "failed" ? "failed" : parts.rewardOf(row);
    const mark = { correct: ["✓", colors.good], incorrect: ["✗", colors.bad], failed: ["!", colors.warn], none: ["", colors.muted] }[kind];
    context.fillStyle = colors.panel; // at the edge, the mark would overlap the lane
    context.fillRect(x - 1, middle - 6, MARK_PX, 12);
    context.fillStyle = mark[1];
    context.font = "bold 11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillText(mark[0], x, middle);
  }

  function timeOfDay(ms, step) {
    const time = new Date(ms);
    const [h, m, s] = [time.getHours(), time.getMinutes(), time.getSeconds()].map((n) => String(n).padStart(2, "0"));
    return step < 60000 ? `${h}:${m}:${s}` : `${h}:${m}`;
  }

  // -- groups

  const GROUP_STATES = [
    ["all", "All"], ["live", "In flight"], ["wrong", "Has a wrong answer"], ["held-out", "Held out"], ["trained", "Not held out"],
    ["signal", "Has signal"], ["no-signal", "No signal"],
  ];

  const GROUP_ORDERS = [["newest", "Newest"], ["worst", "Lowest reward"]];
  const newestFirst = (a, b) => b.start - a.start || (a.id < b.id ? -1 : 1);
  const worstFirst = (a, b) => (a.mean_reward ?? Infinity) - (b.mean_reward ?? Infinity) || newestFirst(a, b);

  window.agentloop.view("groups", {
    title: "Groups",
    mount(root, params, app) {
      const now = app.time;
      const rows = new Map(); // id to the element of a group and the group that it shows
      let query = "";
      let [state, order] = ["all", params.query.get("sort") ?? "newest"];
      const found = h("p", { class: "ro-found" });
      const search = parts.search("id, task or answer", "", (value) => {
        query = value;
        draw();
      });
      const body = h("tbody");
      const names = ["Group", "Task", "State", "Mean reward", "Expected", "A wrong answer", "Kept", "Has signal", "Time"];
      const classes = ["gr-wide", "", "gr-wide", "", "", "", "gr-wide", "gr-wide", "gr-wide num"];
      const head = h("tr", null, names.map((name, i) => h("th", { scope: "col", class: classes[i] || null }, name)));
      const empty = h("p", { class: "v-empty" });
      root.append(
        h(
          "section", { class: "v gr" },
          h(
            "div", { class: "v-bar" }, search,
            parts.choice("State", GROUP_STATES, state, (value) => {
              state = value;
              draw();
            }),
            parts.choice("Sort by", GROUP_ORDERS, order, (value) => {
              order = value;
              draw();
            }),
            found,
          ),
          h(
            "div", { class: "v-table", role: "region", "aria-label": "Groups", tabindex: "0" },
            h("table", null, h("thead", null, head), body), empty,
          ),
        ),
      );

      function fits(group) {
        if (state === "live" && group.state !== "live") return false;
        if (state === "signal" && !group.has_signal) return false;
        if (state === "no-signal" && group.has_signal !== false) return false;
        if (state === "wrong" && !group.wrong) return false;
        if (["held-out", "trained"].includes(state) && group.id.includes("-held-out-") !== (state === "held-out")) return false;
        const texts = [group.id, group.task, group.question, group.answer, group.wrong?.answer];
        return !query || texts.some((text) => String(text ?? "").toLowerCase().includes(query));
      }

      function draw() {
        const everything = [...app.store.groups.values()];
        const shown = everything.filter(fits).sort(order === "worst" ? worstFirst : newestFirst);
        const kept = new Set(shown.map((group) => group.id));
        for (const [id, { node }] of rows) {
          if (kept.has(id)) continue;
          node.remove();
          rows.delete(id);
        }
        shown.forEach((group, index) => {
          let row = rows.get(group.id);
          if (!row) rows.set(group.id, (row = { node: h("tr"), group: null }));
          if (row.group !== group) row.node.replaceChildren(...cells(group));
          row.group = group;
          if (body.children[index] !== row.node) body.insertBefore(row.node, body.children[index] ?? null);
        });
        const some = shown.length === everything.length ? "" : `${format.whole(shown.length)} of `;
        setText(found, `${some}${format.plural(everything.length, "group")}`);
        empty.hidden = shown.length > 0;
        setText(empty, everything.length ? "No matching groups." : "No groups yet.");
      }

      function cells(group) {
        const live = group.state === "live";
        const hasSignal = group.has_signal === null || group.has_signal === undefined ? "–" : group.has_signal ? "yes" : "no";
        const took = ((group.end ?? now()) - group.start) / 1000;
        return [
          h("th", { class: "gr-wide", scope: "row" }, parts.link("group", group.id)),
          h("td", { class: "gr-task" }, h("a", { href: parts.hash("group", group.id), title: String(group.task) }, group.question || String(group.task ?? "–"))),
          h("td", { class: "gr-wide" }, live ? `${group.num_done} of ${group.size} done` : "done"),
          h("td", null, meter(group.mean_reward)),
          h("td", { class: "gr-answer" }, group.answer ?? "–"),
          h("td", { class: "gr-answer" }, group.wrong ? h("a", { href: parts.hash("rollout", group.wrong.id) }, group.wrong.answer || "no answer") : "–"),
          h("td", { class: "gr-wide" }, Number.isFinite(group.kept) ? `${group.kept} of ${group.size}` : "–"),
          h("td", { class: hasSignal === "no" ? "gr-wide v-muted" : "gr-wide" }, hasSignal),
          h("td", { class: "gr-wide num" }, live ? "–" : format.span(took)),
        ];
      }

      const off = app.store.on((changed) => {
        if (changed.has("groups")) draw();
      });
      draw();
      return off;
    },
  });

  /** A mean reward from 0 to 1, as a number and a bar. */
  function meter(value) {
    if (!Number.isFinite(value)) return "–";
    const bar = h("span", { class: "gr-meter", "aria-hidden": "true" }, h("span"));
    bar.firstChild.style.width = `${Math.min(Math.max(value, 0), 1) * 100}%`;
    return h("span", { class: "gr-mean" }, bar, value.toFixed(2));
  }
})();
