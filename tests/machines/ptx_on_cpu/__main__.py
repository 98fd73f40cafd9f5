from ...code.compiled.cases import main

if __name__ == "__main__":
    main()
