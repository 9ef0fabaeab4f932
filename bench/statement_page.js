"use strict";
const root = document.documentElement;
root.classList.add("js");
const articles = [...document.querySelectorAll("article")];
const links = [...document.querySelectorAll("nav li a")];
const pick = document.getElementById("pick");

function show(name, moves) {
  const shown = articles.find(article => article.id === name) || articles[0];
  for (const article of articles) article.classList.toggle("shown", article === shown);
  for (const link of links) {
    if (link.hash.slice(1) === shown.id) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  pick.value = shown.id;
  document.title = "insum_ops: " + shown.querySelector("h2").textContent;
  if (moves) scrollTo(0, 0);
}
function go(name) {
  history.replaceState(null, "", "#" + name);
  show(name, false);
}
function turn(by) {
  const at = articles.findIndex(article => article.classList.contains("shown"));
  go(articles[(at + by + articles.length) % articles.length].id);
}
pick.addEventListener("change", () => go(pick.value));
document.getElementById("previous").addEventListener("click", () => turn(-1));
document.getElementById("next").addEventListener("click", () => turn(1));
addEventListener("hashchange", () => { if (location.hash !== "#main") show(location.hash.slice(1), true); });
for (const link of links) link.addEventListener("click", event => {
  event.preventDefault();
  go(link.hash.slice(1));
  scrollTo(0, 0);
});
// an index under the pointer, or touched, lights up wherever it occurs
function light(target) {
  const index = target instanceof Element && target.closest("[data-index]");
  for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (!index) return;
  const within = index.closest("article").querySelectorAll(`[data-index="${index.dataset.index}"]`);
  for (const place of within) place.classList.add("lit");
}
addEventListener("pointerover", event => light(event.target));
addEventListener("click", event => light(event.target));

const themes = ["automatic", "light", "dark"], button = document.getElementById("theme");
function paint(theme) {
  if (theme === "automatic") delete root.dataset.theme;
  else root.dataset.theme = theme;
  button.textContent = "Theme: " + theme;
}
function kept() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}
let theme = themes.includes(kept()) ? kept() : "automatic";
paint(theme);
button.addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  paint(theme);
  try { localStorage.setItem("theme", theme); } catch { /* the page works without a memory */ }
});
show(location.hash.slice(1), false);
