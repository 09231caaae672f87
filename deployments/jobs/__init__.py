"""What people start with `ray job submit`; see ops/docs/jobs.md."""
