// Turns the counters of each tick into rates, and remembers the last minute of them.

const LENGTH = 60;

// A whole minute, also when we have watched for less.
const padded = (values) => [...Array(LENGTH - values.length).fill(0), ...values];

export class Rates {
  constructor() {
    this.history = new Map();
    this.before = null;
  }

  // counters: Map of name -> {in, out}; time in seconds.
  add(time, counters) {
    if (this.before && time > this.before.time) {
      const span = time - this.before.time;
      for (const [name, now] of counters) {
        const then = this.before.counters.get(name) || now;
        const line = this.history.get(name) || { in: [], out: [] };
        for (const side of ["in", "out"]) {
          line[side].push(Math.max(0, (now[side] - then[side]) / span));
          if (line[side].length > LENGTH) line[side].shift();
        }
        this.history.set(name, line);
      }
      for (const name of this.history.keys()) if (!counters.has(name)) this.history.delete(name);
    }
    this.before = { time, counters };
  }

  series(name) {
    const line = this.history.get(name) || { in: [], out: [] };
    return { in: padded(line.in), out: padded(line.out) };
  }

  last(name, side) {
    return this.series(name)[side].at(-1) || 0;
  }
}
