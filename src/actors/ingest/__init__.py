"""Taking in what a source gives: the pure core of the ingest task, and what it writes."""
