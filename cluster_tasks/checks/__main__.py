if __name__ == "__main__":
    from stacks.host.extras import explain_missing

    explain_missing()  # before imports that this environment may not have

    from cluster_tasks.checks.command import main

    raise SystemExit(main())
