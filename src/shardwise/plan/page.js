"use strict";
(async () => {
  const at = (id) => document.getElementById(id);
  let models, sheets;
  try {
    const bytes = Uint8Array.from(atob(at("tables").textContent), (letter) => letter.charCodeAt(0));
    const opened = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    ({ models, sheets } = JSON.parse(await new Response(opened).text()));
  } catch (error) {
    at("verdict").textContent = "This browser is too old (it has no DecompressionStream).";
    return;
  }
  const MARGIN = 1.15, GIB = 2 ** 30;
  // Lines of the tables: categories on the device in the accountant's order, the host, disks.
  const PARTS = [
    ["parameters", [0], "c1"], ["gradients", [1], "c2"], ["optimizer", [2, 3], "c3"], ["buffers", [4, 5], "c4"],
    ["activations", [6], "c6"], ["other", [7, 8], "c5"],
  ];
  const HOST = 9, CATEGORIES = 9;
  const WAYS = [
    [0, "none", "none"], [1, "none", "none"], [2, "none", "none"], [3, "none", "none"], [1, "cpu", "none"],
    [2, "cpu", "none"], [3, "cpu", "none"], [3, "cpu", "cpu"],
  ];
  const words = ([stage, optimizer, parameters]) =>
    `stage ${stage}` + (parameters === "cpu" ? ", state on the host" : optimizer === "cpu" ? ", optimizer on the host" : "");

  // -- the plan: the largest of some formulas ------------------------------------------------------------------------

  const sizesAt = (tables, ranks, micro, length) => {
    const shards = tables.flats.map(([numel, align]) => align * Math.ceil(numel / (align * ranks)));
    const basis = [
      1, length, length ** 2, micro, micro * length, micro * length ** 2, ...shards,
      ...shards.map((shard) => ranks * shard),
    ];
    return tables.formulas.map((terms) => terms.reduce((sum, [place, count]) => sum + count * basis[place], 0));
  };

  // -- the time: events of a step on the clocks of host, card and link -------------------------------------------------

  const OPERATOR = 0, SHARED = 1, LAUNCH = 2, WAIT = 3, PHASE = 4, FORWARD = 0, BACKWARD = 1, STEP = 2;
  const SETTLED = 16; // passes after which the card is as far behind the host as it will be
  const RING = { all_gather: 1, exchange: 1, reduce_scatter: 1, all_reduce: 2, broadcast: 1 };
  const ratesOf = (settings) => {
    const card = sheets.cards[settings.card], shares = sheets.efficiencies, inside = card && sheets.links[card.inside];
    if (!card) return null;
    const { ranks, local } = settings, machines = Math.ceil(ranks / local), hops = ranks - machines;
    let { bandwidth } = inside, latency = hops * inside.latency;
    if (machines > 1) {
      // The machine with the fewest ranks has the fewest to share its adapters with.
      const between = sheets.links[settings.link], fewest = ranks - (machines - 1) * local;
      const outer = between.bandwidth * settings.adapters * fewest / local;
      latency += (machines - 1) * between.latency;
      if (outer < bandwidth || !hops) bandwidth = outer;
    }
    const ring = bandwidth * shares.links, memory = card.bandwidth * shares.memory;
    const hostMemory = sheets.machine.bandwidth / local * shares.memory;
    return {
      host: shares.host,
      up: sheets.links[card.host].bandwidth * shares.links,
      computing: (type, flops, moved, onHost) => onHost ? moved / hostMemory : !flops ? moved / memory : flops / (card.flops[type] * shares.compute),
      collective: (op, size) => RING[op] * (latency + (op === "broadcast" ? 1 : (ranks - 1) / ranks) * size / ring),
      lacks: (type) => !(type in card.flops),
    };
  };
  const timeOf = (settings, tables, found, transfers, stepOnHost, rates) => {
    const { rows, polynomials } = tables.work, { micro, length, ranks, accumulation } = settings;
    const basis = [1, length, length ** 2, micro, micro * length, micro * length ** 2];
    const sizes = polynomials.map((factors) => factors.reduce((sum, factor, place) => sum + factor * basis[place], 0));
    const elements = tables.flats.reduce((sum, [numel, align]) => sum + align * Math.ceil(numel / (align * ranks)), 0);
    let host = 0, card = 0, link = 0, before = [], flying = [], lacking = "";
    const zeros = () => ({ forward: 0, backward: 0, step: 0, waiting: 0, total: 0 });
    let spent = zeros(), phase = "forward";
    const now = () => Math.max(host, card);
    const one = (number) => {
      const [kind, what, first, second] = rows[number], begun = now();
      if (kind === PHASE) phase = ["forward", "backward", "step"][what];
      else if (kind === LAUNCH) {
        link = Math.max(card, host, link) + rates.collective(what, first);
        flying.push([what, link]);
      } else if (kind === WAIT) {
        const place = what ? flying.findIndex(([op]) => op === what) : -1;
        const end = what ? flying.splice(place, 1)[0][1] : before.length ? before.shift() : 0;
        if (phase !== "step") spent.waiting += Math.max(0, end - now());
        card = Math.max(card, end);
      } else {
        host += rates.host;
        const [type, flops, moved] = kind === SHARED ? ["", 0, what * elements] : [what, sizes[first], sizes[second]];
        if (flops && rates.lacks(type)) lacking = type;
        card = Math.max(card, host) + rates.computing(type, flops, moved, stepOnHost && phase === "step");
      }
      spent[phase] += now() - begun;
    };
    const pass = (runs) => {
      for (const [times, numbers] of runs) for (let time = 0; time < times; time += 1) numbers.forEach(one);
    };
    const all = found.passes, last = all[Math.min(all.length, accumulation) - 1] === all[0] ? null : all[all.length - 1];
    const middle = Math.max(0, accumulation - 2), run = Math.min(middle, SETTLED);
    for (let step = 0; step < 2; step += 1) { // the first step leaves behind what the others begin with
      before = flying.map(([, end]) => end);
      flying = [];
      spent = zeros();
      const begun = now();
      pass(all[0]);
      for (let time = 0; time < run; time += 1) {
        const earlier = { ...spent }, start = now();
        pass(all[1]);
        if (time < SETTLED - 1 || middle === run) continue;
        // All further ones are like this one.
        const more = middle - run, later = more * (now() - start);
        for (const name of ["forward", "backward", "step", "waiting"]) spent[name] += more * (spent[name] - earlier[name]);
        [host, card, link] = [host + later, card + later, link + later];
        before = before.map((end) => end + later);
        flying = flying.map(([op, end]) => [op, end + later]);
      }
      if (last) pass(last);
      spent.total = now() - begun;
    }
    if (lacking) return { lacking };
    const moving = (transfers[0] + accumulation * transfers[1]) / ranks / rates.up;
    spent.transfers = Math.max(0, moving - spent.backward);
    spent.total += spent.transfers;
    return spent;
  };

  const plan = (settings, way, rates) => {
    const tables = models[settings.model].tables[`${settings.precision}${settings.recompute ? "/recompute" : ""}`];
    const [stage, optimizer, parameters] = way;
    const under = (kind) => tables.tables[[kind, optimizer, parameters, Math.min(settings.accumulation, 2)].join("/")];
    const found = under(settings.ranks > 1 ? stage : "one"), { transfers } = under(stage) || found || {};
    if (!found) return null;
    const sizes = sizesAt(tables, settings.ranks, settings.micro, settings.length);
    const peaks = found.peaks.map((numbers) => Math.max(...numbers.map((number) => sizes[number])));
    let total = -1, parts = [];
    for (const numbers of found.totals) {
      const moment = numbers.map((number) => sizes[number]), sum = moment.reduce((one, other) => one + other, 0);
      if (sum > total) [total, parts] = [sum, moment];
    }
    // A pass in the middle is the second of three; tables of state on the device have no third one, and move nothing.
    const passes = found.moved, middle = settings.accumulation - Math.min(passes.length, 2);
    const moved = [0, 1].map((place) => passes.reduce((sum, numbers, pass) =>
      sum + (passes.length > 2 && pass === 1 ? middle : 1) * sizes[numbers[place]], 0));
    const fits = total * MARGIN <= settings.device * GIB &&
      peaks[HOST] * MARGIN <= Math.floor(settings.host * GIB / Math.min(settings.local, settings.ranks));
    const time = rates && found.passes ? timeOf(settings, tables, found, transfers, optimizer !== "none", rates) : null;
    return { way, stage, peaks, total, parts, host: peaks[HOST], moved, fits, time };
  };

  // -- the page ------------------------------------------------------------------------------------------------------

  const NUMBERS = ["length", "ranks", "micro", "accumulation", "device", "local", "host", "adapters"];
  const CHOICES = ["model", "precision", "card", "link"];
  const read = () => {
    const settings = { recompute: at("recompute").checked };
    for (const id of CHOICES) settings[id] = at(id).value;
    for (const id of NUMBERS) settings[id] = at(id).valueAsNumber;
    return settings;
  };
  const element = (name, text = "", attributes = {}) => {
    const made = document.createElement(name);
    made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const unitOf = (most) =>
    [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => most >= size) || ["B", 1];
  const sized = (size) => {
    const [unit, scale] = unitOf(size);
    return unit === "B" ? `${size} B` : `${(size / scale).toFixed(2)} ${unit}`;
  };
  let chosen = null; // a way; none: the first that fits

  const summed = (values, lines) => lines.reduce((sum, line) => sum + values[line], 0);
  const barOf = (plan, parts, most, size, said, classes) => {
    const bar = element("div", "", { class: ["bar", ...classes].join(" ") });
    const track = element("div", "", { class: "track", role: "img" });
    for (const [name, value, colour] of parts) {
      const part = element("div", "", { class: "part", title: `${name}: ${said(value)}` });
      part.style.width = `${100 * value / most}%`;
      part.style.setProperty("--part", `var(--${colour})`);
      track.append(part);
    }
    track.setAttribute("aria-label", `${words(plan.way)}: ${parts.map(([name, value]) => `${name} ${said(value)}`).join(", ")}`);
    bar.append(element("span", words(plan.way), { class: "name" }), track, element("span", size, { class: "size" }));
    return bar;
  };
  const showBars = (settings, plans, pick) => {
    // A card with far more memory than is needed would leave short bars.
    const limit = settings.device * GIB, largest = Math.max(...plans.map((one) => one.total));
    const most = Math.max(largest, Math.min(limit, 2 * largest));
    at("bars").replaceChildren(...plans.map((one) => {
      const parts = PARTS.map(([name, lines, colour]) => [name, summed(one.parts, lines), colour]).filter(([, size]) => size);
      const classes = [...(one === pick ? ["chosen"] : []), ...(one.total * MARGIN > limit ? ["over"] : [])];
      const bar = barOf(one, parts, most, sized(one.total), sized, classes);
      if (limit <= most) {
        const line = element("div", "", { class: "limit", title: `memory of a card: ${sized(limit)}` });
        line.style.left = `calc(${100 * limit / most}% - ${limit === most ? 2 : 1}px)`;
        bar.querySelector(".track").append(line);
      }
      return bar;
    }));
  };
  const TIMES = [
    ["computing", (time) => time.forward + time.backward - time.waiting, "c1"], ["waiting for collectives", (time) => time.waiting, "c4"],
    ["update", (time) => time.step, "c3"], ["transfers of offloaded state", (time) => time.transfers, "c6"],
  ];
  const lasting = (seconds) => seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(1)} ms`;
  const showTimes = (settings, plans, pick) => {
    const known = plans.filter((one) => one.time && !one.time.lacking), card = sheets.cards[settings.card];
    const lacking = plans.find((one) => one.time?.lacking)?.time.lacking;
    const most = Math.max(...known.map((one) => one.time.total));
    at("times").replaceChildren(...known.map((one) => {
      const parts = TIMES.map(([name, of, colour]) => [name, of(one.time), colour]).filter(([, seconds]) => seconds);
      return barOf(one, parts, most, lasting(one.time.total), lasting, one === pick ? ["chosen"] : []);
    }));
    const tokens = settings.micro * settings.accumulation * settings.ranks * settings.length, time = pick?.time;
    at("rate").textContent = !card ? "Choose a card: there are no rates of others."
      : lacking ? `${card.name} has no rate of ${lacking} in its data sheet: choose another precision.`
      : time ? `${words(pick.way)}: ${lasting(time.total)} a step, ${Math.round(tokens / time.total).toLocaleString("en")} tokens a second of all ranks.` : "";
  };
  const showTable = (plans, pick) => {
    const [unit, scale] = unitOf(Math.max(...plans.map((one) => one.total)));
    at("table-title").textContent = `Numbers in ${unit}`;
    const heads = ["total", ...PARTS.map(([name]) => name), "host", "host reads", "host writes"];
    at("head").replaceChildren(element("th", "setting", { scope: "col" }), element("th", "fits", { scope: "col" }),
      ...heads.map((name) => element("th", name, { scope: "col", class: "n" })));
    at("rows").replaceChildren(...plans.map((one, place) => {
      const row = element("tr", "", one === pick ? { class: "chosen" } : {});
      const head = element("th", "", { scope: "row" }), label = element("label"), button = element("input", "", { type: "radio", name: "way", value: place });
      button.checked = one === pick;
      button.addEventListener("change", () => { chosen = one.way.join("/"); show(); document.querySelector(`[name=way][value="${place}"]`).focus(); });
      label.append(button, words(one.way));
      head.append(label);
      const sizes = [one.total, ...PARTS.map(([, lines]) => summed(one.peaks, lines)), one.host, ...one.moved];
      row.append(head, element("td", one.fits ? "yes" : "no", { class: one.fits ? "fits-yes" : "fits-no" }),
        ...sizes.map((size) => element("td", (size / scale).toFixed(2), { class: "n", "data-bytes": size })));
      row.dataset.peaks = JSON.stringify(one.peaks.slice(0, CATEGORIES));
      row.dataset.time = JSON.stringify(one.time);
      return row;
    }));
  };
  const configured = (settings, { way: [stage, optimizer, parameters] }) => {
    const own = models[settings.model].configs[settings.precision];
    const zero = { ...own.zero_optimization, stage };
    delete zero.offload_optimizer;
    delete zero.offload_param;
    if (optimizer !== "none") zero.offload_optimizer = { device: optimizer };
    if (parameters !== "none") zero.offload_param = { device: parameters };
    return {
      train_batch_size: settings.micro * settings.accumulation * settings.ranks,
      train_micro_batch_size_per_gpu: settings.micro,
      gradient_accumulation_steps: settings.accumulation,
      ...own,
      zero_optimization: zero,
    };
  };
  const show = () => {
    const settings = read();
    const wrong = NUMBERS.map(at).find((field) => !field.checkValidity());
    if (wrong) {
      at("verdict").textContent = `${wrong.labels[0].textContent}: ${wrong.validationMessage}`;
      return;
    }
    const rates = ratesOf(settings), plans = WAYS.map((way) => plan(settings, way, rates)).filter((one) => one);
    const first = plans.find((one) => one.fits);
    const pick = plans.find((one) => one.way.join("/") === chosen) || first || plans[plans.length - 1];
    const parameters = models[settings.model].parameters.toLocaleString("en");
    at("verdict").textContent = `${settings.model}, ${parameters} parameters: ` + (first
      ? `${words(first.way)} fits, with ${sized(first.total)} of ${sized(settings.device * GIB)}` + (first.host ? ` and ${sized(first.host)} of the host for each rank.` : ".")
      : `nothing fits. The least is ${sized(Math.min(...plans.map((one) => one.total)))} of a card, plus 15 %.`);
    showBars(settings, plans, pick);
    showTable(plans, pick);
    showTimes(settings, plans, pick);
    at("command").textContent = `shardwise plan ${settings.model} --ranks ${settings.ranks}${settings.precision === "as configured" ? " --config FILE" : ` --precision ${settings.precision}`} --micro-batch ${settings.micro} --accumulation ${settings.accumulation} --length ${settings.length}` + (settings.recompute ? " --recompute" : "")
      + (settings.card ? ` --card ${settings.card} --local-ranks ${settings.local}` : "") + (settings.card && settings.ranks > settings.local ? ` --link ${settings.adapters}x${settings.link}` : "");
    at("json").textContent = JSON.stringify(configured(settings, pick), null, 2);
    for (const slider of document.querySelectorAll("[data-of]")) {
      slider.value = Math.log2(settings[slider.dataset.of] / base(slider));
      slider.setAttribute("aria-valuetext", settings[slider.dataset.of]);
    }
    history.replaceState(null, "", `#${new URLSearchParams({ ...settings, ...(chosen ? { way: chosen } : {}) })}`);
    document.documentElement.dataset.drawn = "yes";
  };
  const base = (slider) => slider.dataset.of === "length" ? 128 : 1;
  const offer = () => {
    const made = models[at("model").value], before = at("precision").value, names = Object.keys(made.configs);
    at("precision").replaceChildren(...names.map((name) => element("option", name)));
    at("precision").value = names.includes(before) ? before : names[0];
    const twice = `${at("precision").value}/recompute` in made.tables;
    at("recompute").disabled = !twice;
    at("recompute").checked &&= twice;
  };
  const restore = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    if (given.get("model") in models) at("model").value = given.get("model");
    offer();
    if (given.get("precision") in models[at("model").value].configs) at("precision").value = given.get("precision");
    at("recompute").checked = given.get("recompute") === "true" && !at("recompute").disabled;
    for (const id of ["card", "link"]) if ([...at(id).options].some((option) => option.value === given.get(id))) at(id).value = given.get(id);
    for (const id of NUMBERS) if (given.has(id)) at(id).value = given.get(id);
    if (WAYS.some((way) => way.join("/") === given.get("way"))) chosen = given.get("way");
  };
  const copy = async (text, what) => {
    try {
      await navigator.clipboard.writeText(text);
      at("copied").textContent = `${what} copied.`;
    } catch (error) { // not allowed on pages without https
      const range = document.createRange();
      range.selectNodeContents(at("json"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      at("copied").textContent = what === "Link" ? "The link is in the address bar." : "The text is selected: copy it.";
    }
  };

  for (const [id, parts] of [["legend", PARTS], ["times-legend", TIMES]]) {
    at(id).append(...parts.map(([name, , colour]) => {
      const item = element("li", name);
      item.style.setProperty("--part", `var(--${colour})`);
      return item;
    }));
  }
  at("settings").addEventListener("input", (event) => {
    const { target } = event;
    at("copied").textContent = "";
    if (target.dataset.of) at(target.dataset.of).value = base(target) * 2 ** target.value;
    if (target.id === "card" && target.value) at("device").value = (sheets.cards[target.value].memory / GIB).toFixed(1);
    if (target.id === "model" || target.id === "precision") offer();
    show();
  });
  at("settings").addEventListener("submit", (event) => event.preventDefault());
  at("copy").addEventListener("click", () => copy(at("json").textContent, "Configuration"));
  at("copy-link").addEventListener("click", () => copy(location.href, "Link"));
  addEventListener("hashchange", () => { restore(); show(); });
  restore();
  show();
})();
