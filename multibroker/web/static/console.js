// The console: one page per hash, fed by one stream of ticks.

import { call, loggedIn, setToken, stream } from "./api.js";
import { age, bytes, el, number, redraw, spark, table } from "./dom.js";
import { Rates } from "./rates.js";
import { topicPage } from "./topic.js";

const main = document.getElementById("main");
const phase = document.getElementById("phase");
const topicRates = new Rates();
const wireRates = new Rates();
let tick = null;
let page = { update() {}, close() {} };

export function toast(text) {
  const place = document.getElementById("toast");
  place.textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { place.textContent = ""; }, 5000);
}

function setPhase(text) {
  phase.textContent = text;
  phase.className = `badge ${text === "ready" ? "ready" : "down"}`;
}

// One stream of ticks for all pages; it comes back by itself when the broker does.
function listen() {
  stream("events", (name, data) => {
    if (name !== "tick") return;
    tick = data;
    setPhase(data.phase);
    topicRates.add(data.time, new Map(data.topics.map((topic) =>
      [topic.path, { in: topic.messages_in, out: topic.messages_out }])));
    wireRates.add(data.time, new Map(Object.entries(data.protocols).map(([name, wire]) =>
      [name, { in: wire.messages_in, out: wire.messages_out }])));
    page.update(data);
  }, (error) => {
    setPhase("no connection");
    if (error && error.status === 401) openLogin();
    else setTimeout(listen, 2000);
  });
}

const total = (topic, field) => topic.partitions.reduce((sum, part) => sum + field(part), 0);
const messages = (topic) => total(topic, (part) => part.last - part.first + 1);
const chart = (rates, name) => spark(`messages per second of ${name}`,
  [["in", rates.series(name).in], ["out", rates.series(name).out]]);
const legend = () => el("p", { class: "legend" },
  el("span", { class: "in" }, "messages in"), el("span", { class: "out" }, "messages out"));

function topicsPage() {
  const cards = el("div", { class: "cards" });
  const list = el("div");
  const name = el("input", { name: "name", required: true, autocomplete: "off" });
  const parts = el("input", { name: "partitions", type: "number", min: 1, max: 1024, value: 1 });
  const form = el("form", { class: "row", onsubmit: async (event) => {
    event.preventDefault();
    await attempt(async () => {
      const topic = await call("POST", "topics", { name: name.value, partitions: Number(parts.value) });
      toast(`Topic ${topic.name} created`);
      location.hash = `#/topic/${topic.path}`;
    });
  } }, el("label", {}, "Name", name), el("label", {}, "Partitions", parts),
  el("label", {}, el("button", { type: "submit" }, "Create topic")));
  main.replaceChildren(el("h1", {}, "Topics"), cards, el("section", { class: "card" }, list),
    el("section", { class: "card" }, el("h2", {}, "New topic"), form));
  return {
    close() {},
    update(data) {
      cards.replaceChildren(...Object.entries(data.protocols).map(([wire, counts]) =>
        el("section", { class: "card" },
          el("h2", {}, wire),
          el("p", { class: "big" }, `${number(wireRates.last(wire, "in") + wireRates.last(wire, "out"))} msg/s`),
          chart(wireRates, wire),
          el("p", { class: "faint" }, `${number(counts.connections)} connections, ${number(counts.errors)} errors`))));
      redraw(list, legend(), table(
        data.topics_total > data.topics.length ? `The first ${data.topics.length} of ${data.topics_total} topics` : "",
        [["Topic", "name"], ["Partitions", "number"], ["Messages", "number"], ["Size", "number"],
          ["Range", "number"], ["In/s", "number"], ["Out/s", "number"], ["Last minute", ""]],
        data.topics.map((topic) => [
          el("a", { href: `#/topic/${topic.path}` }, topic.name || "(empty name)"),
          number(topic.partitions.length), number(messages(topic)),
          bytes(total(topic, (part) => part.bytes)),
          topic.partitions.length === 1 ? `${topic.partitions[0].first} – ${topic.partitions[0].last}` : "",
          number(topicRates.last(topic.path, "in")), number(topicRates.last(topic.path, "out")),
          chart(topicRates, topic.path)])));
      if (!data.topics.length) list.append(el("p", { class: "faint" }, "No topics yet: publish something, or create one below."));
    },
  };
}

// Pages that only show a list, fetched again with every tick while they are open.
function listPage(title, path, render) {
  const place = el("section", { class: "card" });
  main.replaceChildren(el("h1", {}, title), place);
  let busy = false;
  async function update() {
    if (busy) return;
    busy = true;
    try { redraw(place, render(await call("GET", path))); }
    catch (error) { place.replaceChildren(el("p", { class: "problem" }, error.message)); }
    finally { busy = false; }
  }
  update();
  return { update, close() {} };
}

const consumersPage = () => listPage("Consumers and groups", "consumers", (rows) => rows.length
  ? table("", [["Name", "name"], ["Topic", "name"], ["Position", "number"], ["Lag", "number"],
    ["In flight", "number"], ["Readers", "number"]], rows.map((row) => [row.name || "(private)",
    el("a", { href: `#/topic/${row.topic_path}` }, row.topic), number(row.position), number(row.lag),
    number(row.in_flight), number(row.readers)]))
  : el("p", { class: "faint" }, "No consumers."));

function connectionsPage() {
  const rates = new Rates();
  return listPage("Connections", "connections", (rows) => {
    const id = (row) => `${row.protocol} ${row.peer}`;
    rates.add(Date.now() / 1000, new Map(rows.map((row) => [id(row), { in: row.bytes_in, out: row.bytes_out }])));
    const now = tick ? tick.time : 0;
    return el("div", {},
      el("p", { class: "faint" }, `Resumable sessions kept: ${tick && tick.sessions != null ? number(tick.sessions) : "–"}`),
      rows.length ? table("", [["Protocol", ""], ["Peer", "name"], ["Open for", "number"],
        ["In", "number"], ["Out", "number"], ["In/s", "number"], ["Out/s", "number"], ["Position", "name"]],
      rows.map((row) => [row.protocol, row.peer, age(now - row.opened), bytes(row.bytes_in),
        bytes(row.bytes_out), bytes(rates.last(id(row), "in")), bytes(rates.last(id(row), "out")), row.position]))
        : el("p", { class: "faint" }, "Nobody is connected."));
  });
}

const logPage = () => listPage("Warnings and errors", "log", (rows) => rows.length
  ? table("Newest first", [["Time", ""], ["Level", ""], ["Where", ""], ["What", "name"]],
    rows.reverse().map((row) => [new Date(row.time * 1000).toLocaleString(), row.level, row.system, row.text]))
  : el("p", { class: "faint" }, "Nothing to report."));

// Runs something that changes the broker; a refusal for lack of a token opens the login.
export async function attempt(action) {
  try { await action(); }
  catch (error) {
    if (error.status === 401 || error.status === 403) openLogin(error.message);
    else toast(error.message);
  }
}

const login = document.getElementById("login");
const access = document.getElementById("access");

function openLogin(problem = "") {
  document.getElementById("login-problem").textContent = problem;
  if (!login.open) login.showModal();
}

function showAccess() {
  access.textContent = loggedIn() ? "Log out" : "Log in";
}

access.addEventListener("click", () => {
  if (!loggedIn()) return openLogin();
  setToken("");
  showAccess();
  toast("Logged out");
});
document.getElementById("login-cancel").addEventListener("click", () => login.close());
login.addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  setToken(field.value.trim());
  field.value = "";
  try {
    const { role } = await call("GET", "whoami");
    if (role !== "admin") throw new Error("this token may only read");
    login.close();
    toast("Logged in as admin");
  } catch (error) {
    setToken("");
    openLogin(error.message);
  }
  showAccess();
});

function route() {
  page.close();
  const path = location.hash.replace(/^#/, "") || "/";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${path}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (path.startsWith("/topic/")) page = topicPage(main, path.slice(7), topicRates);
  else page = ({ "/consumers": consumersPage, "/connections": connectionsPage, "/log": logPage }[path] || topicsPage)();
  document.title = `${main.querySelector("h1")?.textContent || "multibroker"} · multibroker`;
  if (tick) page.update(tick);
}

window.addEventListener("hashchange", () => { route(); main.focus(); });
showAccess();
route();
listen();
