"use strict";
const places = [...document.querySelectorAll("[data-figure]")];
const settings = { responsive: true, displaylogo: false, scrollZoom: false };
for (const place of places) {
  const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
  Plotly.newPlot(place, figure.data, figure.layout, settings);
}
// Paper is narrower than a screen and cannot be unfolded: fit the figures, open the tables, and put all back afterwards.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
  for (const place of places) Plotly.relayout(place, { width: 680 });
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
  for (const place of places) Plotly.relayout(place, { width: null, autosize: true });
});
