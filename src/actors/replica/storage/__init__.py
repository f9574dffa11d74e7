"""The storage half of a worker: state machines of ingestions and sinks, and the part that runs
them."""
