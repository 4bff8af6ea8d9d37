// Values of a chart: by pointer the nearest one, by keyboard with the arrows. Without this script each has its <title>.
for (const chart of document.querySelectorAll('.chart')) {
  const svg = chart.querySelector('svg'), tip = chart.querySelector('.tip');
  const points = [...svg.querySelectorAll('.point')].map(mark => {
    const title = mark.querySelector('title'), text = title.textContent;
    title.remove();
    return { mark, text, series: mark.parentNode, block: +mark.dataset.block };
  });
  let chosen;
  const centre = point => {
    const box = point.mark.getBoundingClientRect(), own = chart.getBoundingClientRect();
    return [box.x + box.width / 2 - own.x, box.y + box.height / 2 - own.y];
  };
  const hide = () => { chosen?.mark.classList.remove('picked'); chosen = undefined; tip.hidden = true; };
  const show = point => {
    if (point === chosen) return;
    hide();
    chosen = point;
    point.mark.classList.add('picked');
    tip.textContent = point.text;
    tip.hidden = false;
    const [x, y] = centre(point), width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(0, Math.min(x - width / 2, chart.clientWidth - width)) + 'px';
    tip.style.top = (y > height + 14 ? y - height - 12 : y + 14) + 'px';
  };
  const nearest = event => {
    const own = chart.getBoundingClientRect();
    let best, least = 40;
    for (const point of points) {
      if (point.series.classList.contains('dim')) continue;
      const [x, y] = centre(point), distance = Math.hypot(x + own.x - event.clientX, y + own.y - event.clientY);
      if (distance < least) [best, least] = [point, distance];
    }
    best ? show(best) : hide();
  };
  svg.addEventListener('pointermove', nearest);
  svg.addEventListener('pointerdown', nearest);
  svg.addEventListener('pointerleave', event => { if (event.pointerType === 'mouse') hide(); });
  svg.addEventListener('blur', hide);
  svg.addEventListener('focus', () => { if (svg.matches(':focus-visible')) show(points[0]); });
  svg.addEventListener('keydown', event => {
    const at = chosen ?? points[0], all = [...new Set(points.map(point => point.series))];
    const along = points.filter(point => point.series === at.series), i = along.indexOf(at);
    const turn = step => {
      const other = all[(all.indexOf(at.series) + step + all.length) % all.length];
      const there = points.filter(point => point.series === other);
      return there.reduce((a, b) => Math.abs(b.block - at.block) < Math.abs(a.block - at.block) ? b : a);
    };
    const next = {
      ArrowLeft: () => along[Math.max(0, i - 1)], ArrowRight: () => along[Math.min(along.length - 1, i + 1)],
      ArrowDown: () => turn(1), ArrowUp: () => turn(-1),
    }[event.key];
    if (event.key === 'Escape') hide();
    if (next) { event.preventDefault(); show(next()); }
  });
  const buttons = [...chart.parentNode.querySelectorAll('.legend button')];
  for (const button of buttons) button.addEventListener('click', () => {
    const on = button.getAttribute('aria-pressed') !== 'true';
    for (const other of buttons) other.setAttribute('aria-pressed', on && other === button);
    for (const series of svg.querySelectorAll('.series'))
      series.classList.toggle('dim', on && series.dataset.series !== button.dataset.series);
    hide();
  });
}
