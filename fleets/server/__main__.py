if __name__ == "__main__":
    from stacks.host.extras import explain_missing

    explain_missing()  # before imports that this environment may not have

    from fleets.server.commands import main

    raise SystemExit(main())
