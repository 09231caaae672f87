"""What of `forebay` runs as a job of a Ray cluster; see ops/docs/jobs.md."""
