// Cuts a question into words of the index: Chinese has no spaces, so the longest known word comes first.
function splitQuery(query) {
  const known = (word) => word in Search._index.terms || word in Search._index.titleterms;
  const words = [];
  for (const run of query.match(/\p{Script=Han}+|[^\p{Script=Han}]+/gu) ?? []) {
    if (!/\p{Script=Han}/u.test(run)) {
      words.push(...run.split(/[^\p{Letter}\p{Number}_]+/u).filter(Boolean));
      continue;
    }
    for (let at = 0; at < run.length; ) {
      let size = run.length - at;
      while (size > 1 && !known(run.slice(at, at + size))) size--;
      if (size > 1) words.push(run.slice(at, at + size));
      at += size;
    }
  }
  return words;
}
