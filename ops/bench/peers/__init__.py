"""The engines that `forebay bench engine` measures, each a worker process that speaks JSON lines."""
