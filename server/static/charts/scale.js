// Round numbers for axes.

/** Four to six round ticks from 0 to at least `top`. */
export function niceTicks(top) {
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = 0; tick < top + step * 0.999; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}
