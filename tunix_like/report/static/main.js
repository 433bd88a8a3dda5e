// Builds the page.

document.title = `${DATA.runs.map((run) => run.name).join(", ")} - tunix-like report`;
document.getElementById("page").append(
  make("h1", {}, DATA.runs.map((run) => run.name).join(", ")),
  toolbar(), overview(), curvesSection(), passRates(), timeSection(), rolloutsSection(),
);
