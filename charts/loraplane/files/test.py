import sys
import time
import urllib.error
import urllib.request

DEADLINE = time.monotonic() + 90


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError as error:
        print(f"{url}: {error}", flush=True)
        return 0


def expect(url: str, wanted: int) -> None:
    while (seen := status(url)) != wanted:
        if time.monotonic() > DEADLINE:
            sys.exit(f"{url} answers {seen}, and should {wanted}")
        time.sleep(1)
    print(f"{url}: {wanted}", flush=True)


gateway, registry = sys.argv[1:]
expect(f"{gateway}/health/ready", 200)
expect(f"{gateway}/v1/models", 401)
expect(f"{registry}/health/ready", 200)
expect(f"{registry}/admin/tenants", 401)
