from cluster_tasks.checks.command import main

if __name__ == "__main__":
    raise SystemExit(main())
