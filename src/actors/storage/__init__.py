"""The storage half of a worker: the rules of ingestions and sinks, pure."""
