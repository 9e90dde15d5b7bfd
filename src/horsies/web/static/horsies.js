// Live updates, keys and local times. Every page works without this script.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const set = (element, values) => { for (const name in values) element.setAttribute(name, values[name]); };

  // The only place that turns text into elements: the regions that the server renders and escapes.
  const policy = window.trustedTypes
    ? trustedTypes.createPolicy("horsies", { createHTML: (text) => text })
    : { createHTML: (text) => text };

  function parse(html) {
    const template = document.createElement("template");
    template.innerHTML = policy.createHTML(html);
    return template.content;
  }

  // ---- Patching: change the elements that differ, keep focus, selection, open details and scrolling.

  const FIELDS = new Set(["INPUT", "SELECT", "TEXTAREA"]);
  const KEPT = { DETAILS: ["open"], BUTTON: ["hidden", "aria-pressed"], svg: ["width", "height", "data-zoom"] };

  function patchNode(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if (old.isEqualNode(fresh)) return;
    // A field belongs to the person who fills it; the token of a form does not.
    if (FIELDS.has(old.tagName) && old.type !== "hidden") return;
    patchAttributes(old, fresh);
    patchChildren(old, fresh);
  }

  function patchAttributes(old, fresh) {
    const kept = KEPT[old.tagName] || [];
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && !kept.includes(name)) old.setAttribute(name, value);
    }
  }

  const keyOf = (node) => node.nodeType === Node.ELEMENT_NODE && node.getAttribute("data-key");

  function patchChildren(old, fresh) {
    if ([...old.children, ...fresh.children].some(keyOf)) patchRows(old, fresh);
    else patchInOrder(old, fresh);
  }

  const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.id === b.id;

  // Pairs from both ends first, so an element that comes or goes replaces none of the others.
  function patchInOrder(old, fresh) {
    const before = [...old.childNodes];
    const after = [...fresh.childNodes];
    const pairAt = (at) => before.length && after.length && isSame(before.at(at), after.at(at));
    let end = null;
    while (pairAt(0)) patchNode(before.shift(), after.shift());
    while (pairAt(-1)) patchNode(end = before.pop(), after.pop());
    after.forEach((node, index) => {
      const there = before[index];
      if (!there) old.insertBefore(node, end);
      else if (isSame(there, node)) patchNode(there, node);
      else there.replaceWith(node);
    });
    before.slice(after.length).forEach((node) => node.remove());
  }

  // Rows keep their places. A list with data-steady gets no new rows and loses none.
  function patchRows(old, fresh) {
    const isSteady = old.hasAttribute("data-steady");
    let count = 0;
    const named = (row) => keyOf(row) || `#${row.tagName}${count++}`;
    const known = new Map([...old.children].map((row) => [named(row), row]));
    count = 0;
    let last = null;
    for (const row of [...fresh.children]) {
      const name = named(row);
      const there = known.get(name);
      if (there) {
        patchNode(there, row);
        known.delete(name);
        last = there;
      } else if (!isSteady) {
        if (last) last.after(row);
        else old.prepend(row);
        last = row;
      }
    }
    if (!isSteady) known.forEach((row) => row.remove());
  }

  // ---- Live: one stream while the tab is visible.

  const main = one("main");
  const badge = one("[data-badge]");
  const STALE_MS = 10000;
  const AGAIN_MS = 5000;
  const held = new Map();
  let source = null;
  let isPaused = false;
  let hasEnded = false;
  let arrivedAt = 0;
  let sampledAt = new Date();

  function show(state, text, title = "") {
    badge.dataset.state = state;
    document.body.classList.toggle("is-stale", state === "stale");
    const button = one("button", badge) || badge.appendChild(document.createElement("button"));
    button.textContent = text;
    button.title = title || (state === "paused" ? "Resume (p)" : "Pause (p)");
  }

  const clock = (date) => format(date).slice(11, 19);
  const showStale = (why) => show("stale", `stale since ${clock(sampledAt)}`, why);

  // A region without the white space around its block, which the samples do not have.
  function trimmed(region) {
    for (const node of [region.firstChild, region.lastChild]) {
      if (node && node.nodeType === Node.TEXT_NODE && !node.data.trim()) node.remove();
    }
    return region;
  }

  function apply(regions) {
    for (const [name, html] of Object.entries(regions)) held.set(name, html);
    for (const [name, html] of held) {
      const region = one(`[data-region="${CSS.escape(name)}"]`);
      // Nothing moves under a selection or an open form; the newest text waits.
      if (region && one("[data-select]:checked, details[open] form", region)) continue;
      held.delete(name);
      if (region) patchChildren(trimmed(region), parse(html.trim()));
    }
    showTimes();
    countSelected();
  }

  function onSample(event) {
    const { at, regions } = JSON.parse(event.data);
    arrivedAt = Date.now();
    sampledAt = new Date(at);
    apply(regions);
    show("live", "live");
    main.dispatchEvent(new CustomEvent("horsies:sample"));
  }

  function open() {
    if (source || isPaused || hasEnded || document.hidden) return;
    arrivedAt = Date.now();
    source = new EventSource(main.dataset.live);
    source.addEventListener("sample", onSample);
    source.addEventListener("tick", () => { arrivedAt = Date.now(); });
    source.addEventListener("stale", (event) => showStale(JSON.parse(event.data).sentence));
    source.addEventListener("end", () => {
      hasEnded = true;
      close();
      badge.hidden = true;
    });
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) {
        close();
        setTimeout(open, AGAIN_MS);
      }
    });
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  function togglePause() {
    if (!badge || hasEnded) return;
    isPaused = !isPaused;
    if (isPaused) {
      close();
      show("paused", "paused");
    } else {
      show("live", "live");
      open();
    }
  }

  function startLive() {
    if (!main || !main.dataset.live || !badge) return;
    badge.textContent = "";
    show("live", "live");
    badge.addEventListener("click", togglePause);
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
    window.addEventListener("pagehide", close);
    window.addEventListener("pageshow", open);
    setInterval(() => {
      const isQuiet = Date.now() - arrivedAt > STALE_MS;
      if (!isPaused && !hasEnded && !document.hidden && isQuiet) showStale("No answer for 10 s.");
    }, 1000);
    open();
  }

  // ---- Times: UTC as rendered, or local.

  const zoneButton = one("[data-zone]");
  let isLocal = stored("horsies-zone") === "local";

  function stored(name, value) {
    try {
      if (value === undefined) return localStorage.getItem(name);
      localStorage.setItem(name, value);
    } catch { /* storage may be forbidden; the choice then lasts for this page */ }
    return null;
  }

  function format(date) {
    const shifted = isLocal ? new Date(date.getTime() - date.getTimezoneOffset() * 60000) : date;
    return shifted.toISOString().replace("T", " ").replace("Z", "");
  }

  // The parts of "2026-01-31 12:34:56.789" that a text of this form shows.
  const FORMS = [
    [/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$/, 0, 19],
    [/^\d{4}-\d\d-\d\d \d\d:\d\d$/, 0, 16],
    [/^\d\d-\d\d \d\d:\d\d$/, 5, 16],
    [/^\d\d:\d\d:\d\d\.\d{3}$/, 11, 23],
    [/^\d\d:\d\d:\d\d$/, 11, 19],
    [/^\d\d:\d\d$/, 11, 16],
  ];

  function showTimes() {
    for (const time of all("time[datetime]")) {
      const date = new Date(time.dateTime);
      const form = FORMS.find(([pattern]) => pattern.test(time.textContent.trim()));
      if (Number.isNaN(date.getTime())) continue;
      const text = format(date);
      if (form) {
        const shown = text.slice(form[1], form[2]);
        if (time.textContent !== shown) time.textContent = shown;
      }
      time.title = `${text.slice(0, 19)} ${isLocal ? "local time" : "UTC"}`;
    }
    if (zoneButton) zoneButton.textContent = isLocal ? "Local" : "UTC";
  }

  function toggleZone() {
    isLocal = !isLocal;
    stored("horsies-zone", isLocal ? "local" : "utc");
    showTimes();
  }

  // ---- Lists: the current row has the focus; x selects it.

  const rows = () => all("tr[data-key], li[data-key]", main).filter((row) => one("a[href]", row));
  const currentRow = () => document.activeElement.closest("tr[data-key], li[data-key]");

  function move(step) {
    const list = rows();
    if (!list.length) return;
    const at = list.indexOf(currentRow());
    const next = at < 0 ? (step > 0 ? 0 : list.length - 1) : at + step;
    const row = list[Math.min(Math.max(next, 0), list.length - 1)];
    one("a[href]", row).focus();
    row.scrollIntoView({ block: "nearest" });
  }

  function selectCurrent() {
    const row = currentRow();
    const box = row && one("[data-select]", row);
    if (box) box.click();
  }

  function countSelected() {
    const count = all("[data-select]:checked").length;
    for (const place of all("[data-selected-count]")) place.textContent = String(count);
    for (const place of all("[data-needs-selection]")) place.disabled = count === 0;
  }

  // ---- Graph of a run: arrows move along its edges, and up and down inside a layer.

  const nodeOf = (element) => element.closest && element.closest("g.node");
  const placeOf = (node) => (node.getAttribute("transform").match(/-?\d+/g) || []).map(Number);

  function neighbours(node, key) {
    const name = node.dataset.key.slice(1);
    const [x, y] = placeOf(node);
    if (key === "ArrowRight" || key === "ArrowLeft") {
      const ends = all(".edge", node.ownerSVGElement).map((edge) => edge.dataset.key.slice(1).split("-"));
      const names = key === "ArrowRight"
        ? ends.filter((end) => end[0] === name).map((end) => end[1])
        : ends.filter((end) => end[1] === name).map((end) => end[0]);
      return names.map((other) => one(`g.node[data-key="n${other}"]`, node.ownerSVGElement))
        .sort((a, b) => Math.abs(placeOf(a)[1] - y) - Math.abs(placeOf(b)[1] - y));
    }
    const down = key === "ArrowDown" ? 1 : -1;
    return all("g.node", node.ownerSVGElement)
      .filter((other) => placeOf(other)[0] === x && (placeOf(other)[1] - y) * down > 0)
      .sort((a, b) => (placeOf(a)[1] - placeOf(b)[1]) * down);
  }

  function moveAlong(event) {
    const node = event.key.startsWith("Arrow") && nodeOf(document.activeElement);
    const next = node && neighbours(node, event.key)[0];
    if (!next) return false;
    event.preventDefault();
    one("a", next).focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
    return true;
  }

  // Zoom sets the size of the drawing; its frame scrolls.
  const frame = one(".graph-frame");
  const drawn = () => one("svg.graph");
  let isFollowing = false;

  const centre = (node) => node.scrollIntoView({ block: "center", inline: "center" });

  function zoom(factor) {
    const svg = drawn();
    const { width, height } = svg.viewBox.baseVal;
    const now = svg.getScreenCTM().a;
    const fit = Math.min(frame.clientWidth / width, (innerHeight * 0.75) / height, 1);
    const scale = factor ? Math.min(Math.max(now * factor, 0.05), 3) : fit;
    const middle = (scroll, size) => ((scroll + size / 2) / now) * scale - size / 2;
    const place = [middle(frame.scrollLeft, frame.clientWidth), middle(frame.scrollTop, frame.clientHeight)];
    set(svg, { width: Math.floor(width * scale), height: Math.floor(height * scale), "data-zoom": "" });
    frame.scrollTo(...place);
  }

  function jumpToFailed() {
    const found = all("g.node.status-failed");
    if (!found.length) return;
    const next = found[(found.indexOf(nodeOf(document.activeElement)) + 1) % found.length];
    if (drawn().getScreenCTM().a < 0.6) zoom(0.8 / drawn().getScreenCTM().a);
    one("a", next).focus({ preventScroll: true });
    centre(next);
  }

  function trackRunning() {
    const running = isFollowing && one("g.node.status-running");
    if (running) centre(running);
  }

  const GRAPH = {
    in: () => zoom(1.25),
    out: () => zoom(0.8),
    fit: () => zoom(0),
    failed: jumpToFailed,
    follow: () => {
      isFollowing = !isFollowing;
      one("[data-graph=follow]").ariaPressed = String(isFollowing);
      trackRunning();
    },
  };

  function startGraph() {
    if (!drawn()) return;
    Object.assign(KEYS, { "+": GRAPH.in, "-": GRAPH.out, 0: GRAPH.fit, f: GRAPH.failed, r: GRAPH.follow });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-graph]");
      if (button) GRAPH[button.dataset.graph]();
    });
    main.addEventListener("horsies:sample", trackRunning);
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.1 : 0.9);
    }, { passive: false });
    // A drag begins between the nodes; it may then pass over them.
    frame.addEventListener("pointerdown", ({ target, pointerId }) => {
      if (target !== frame && !nodeOf(target)) frame.setPointerCapture(pointerId);
    });
    frame.addEventListener("pointermove", (event) => {
      const isDrag = event.buttons === 1 && frame.hasPointerCapture(event.pointerId);
      if (isDrag) frame.scrollBy(-event.movementX, -event.movementY);
    });
  }

  // ---- Suggestions below the search box. The focus stays in the box; arrows choose, Enter opens.

  const SUGGESTED_MAX = 8;
  let asking = null;
  let pause = 0;

  function showSuggestions(matches) {
    const box = one("#search"), list = one("#suggestions");
    list.replaceChildren(...matches.slice(0, SUGGESTED_MAX).map((match, place) => {
      const item = document.createElement("li"), details = document.createElement("small");
      item.id = `suggestion-${place}`;
      item.setAttribute("role", "option");
      item.dataset.path = match.path;
      item.append(match.name);
      details.append([match.kind, match.detail].filter(Boolean).join(": "));
      item.append(details);
      return item;
    }));
    list.hidden = !matches.length;
    box.setAttribute("aria-expanded", String(!list.hidden));
    box.removeAttribute("aria-activedescendant");
    one("[data-suggested]").textContent = matches.length ? `${list.children.length} of ${matches.length} matches` : "";
  }

  async function suggest() {
    const text = one("#search").value.trim();
    if (asking) asking.abort();
    if (text.length < 2) { showSuggestions([]); return; }
    asking = new AbortController();
    try {
      const path = `${document.body.dataset.root || ""}/api/search?q=${encodeURIComponent(text)}`;
      const answer = await fetch(path, { signal: asking.signal });
      showSuggestions(answer.ok ? (await answer.json()).matches : []);
    } catch { /* a newer text is asked for, or the server is gone: the form still works */ }
  }

  function chooseSuggestion(event) {
    const items = all("#suggestions li");
    const chosen = items.findIndex((item) => item.ariaSelected === "true");
    if (event.key === "Escape") { showSuggestions([]); return; }
    if (event.key === "Enter" && chosen >= 0) {
      event.preventDefault();
      follow(items[chosen].dataset.path);
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !items.length) return;
    event.preventDefault();
    const next = (chosen + step + items.length + (chosen < 0 && step < 0 ? 1 : 0)) % items.length;
    items.forEach((item, place) => item.setAttribute("aria-selected", String(place === next)));
    event.target.setAttribute("aria-activedescendant", items[next].id);
  }

  function startSuggestions() {
    const box = one("#search");
    if (!box) return;
    set(box, { role: "combobox", "aria-autocomplete": "list", "aria-controls": "suggestions", "aria-expanded": false });
    box.addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(suggest, 200); });
    box.addEventListener("keydown", chooseSuggestion);
    box.addEventListener("blur", () => setTimeout(() => showSuggestions([]), 150));
    one("#suggestions").addEventListener("mousedown", (event) => {
      const item = event.target.closest("li");
      if (item) follow(item.dataset.path);
    });
  }

  startSuggestions();

  // ---- Keys.

  const KEYS = {
    "/": () => { const box = one("#search"); if (box) box.focus(); },
    "?": () => follow("/help"),
    j: () => move(1),
    k: () => move(-1),
    x: selectCurrent,
    p: togglePause,
    u: toggleZone,
  };
  let isGoing = false;

  function follow(path) { location.assign((document.body.dataset.root || "") + path); }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    if (target.matches("input:not([type=checkbox]), select, textarea, [contenteditable]")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (isGoing) {
      isGoing = false;
      const link = one(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) link.click();
      return;
    }
    if (event.key === "g") {
      isGoing = true;
      setTimeout(() => { isGoing = false; }, 1500);
      return;
    }
    if (moveAlong(event)) return;
    const action = KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // ---- Small helpers of pages: copy, select all.

  document.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy && navigator.clipboard) navigator.clipboard.writeText(copy.dataset.copy);
  });

  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-select-all]")) {
      for (const box of all("[data-select]")) box.checked = event.target.checked;
    }
    countSelected();
  });

  document.addEventListener("keydown", onKey);
  startGraph();
  for (const element of all("[data-zone], [data-copy], [data-graph]")) element.hidden = false;
  if (zoneButton) zoneButton.addEventListener("click", toggleZone);
  const selected = one("g.node.selected");
  if (selected) selected.scrollIntoView({ block: "nearest", inline: "center" });
  showTimes();
  countSelected();
  startLive();
})();
