"""The storage half of a worker: the state machines of ingestions and sinks, and the code that runs
them."""
