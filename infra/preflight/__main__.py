if __name__ == "__main__":
    from stacks.interrupts import end_on_interrupt

    end_on_interrupt()  # before imports that take seconds

    from infra.preflight.command import main

    raise SystemExit(main())
