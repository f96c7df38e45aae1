// Round numbers for axes.

/** Three to seven round ticks from 0 to at least `top`, `least` or more apart; with a `least` all are whole. */
export function niceTicks(top, least = 0) {
  const rough = Math.max(top / 5, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough && (!least || Number.isInteger(size)));
  const ticks = [];
  for (let tick = 0; tick < top + step * 0.999; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}
