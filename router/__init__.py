"""From a client's HTTP request to a replica and back: admission, queue, placement, journal, streams."""
