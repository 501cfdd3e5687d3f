from vit_edge.cli.main import main

main()
