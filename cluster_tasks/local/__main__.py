from cluster_tasks.local.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
