if __name__ == "__main__":
    from stacks.host.interrupts import end_on_interrupt

    end_on_interrupt()  # before imports that take seconds

    from stacks.host.extras import explain_missing

    explain_missing()

    from infra.preflight.command import main

    raise SystemExit(main())
