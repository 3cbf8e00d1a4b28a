for (const table of document.querySelectorAll('table.sortable')) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, i) => row.cells[i].textContent.trim();
  const number = text => parseFloat(text.replace(/[,\s]/g, '').replace('\u2212', '-'));
  heads.forEach((head, i) => {
    if (head.querySelector('.hidden')) return;
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const rows = [...body.rows];
      const known = rows.filter(row => key(row, i) && key(row, i) !== '\u2013');
      const numeric = known.length && known.every(row => !Number.isNaN(number(key(row, i))));
      const order = (a, b) => numeric ? number(key(a, i)) - number(key(b, i)) : key(a, i).localeCompare(key(b, i));
      known.sort((a, b) => down ? order(b, a) : order(a, b));
      body.append(...known, ...rows.filter(row => !known.includes(row)));
    });
  });
}
