import java.math.BigDecimal;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Objects;
import java.util.Set;

/**
 * What Spark's JDBC driver for Connect can do: {@code ConnectJdbcProgram HOST:PORT} tells it, as
 * client_probe.py has it.
 */
public class ConnectJdbcProgram {
  private static final String FOREVER =
      "SELECT sum(hash(a.id * b.id + o.id)) FROM range(10000000) a, range(10000000) b, orders o";
  private static String url;

  /** One thing that is tried on a connection of its own. */
  private interface Attempt {
    void run(Connection db) throws Exception;
  }

  public static void main(String[] arguments) throws Exception {
    url = "jdbc:sc://" + arguments[0];
    try (Connection db = DriverManager.getConnection(url)) {
      tell("client", "Connect JDBC", db.getMetaData().getDriverVersion());
    }
    tell("lacks", "parameters", "the driver has no PreparedStatement");
    tell("lacks", "batch", "the driver has no PreparedStatement");
    tell("lacks", "transaction", "Spark has no transactions");
    tell("lacks", "subscribe", "Spark's protocol returns only finite results");
    tries("connect", ConnectJdbcProgram::connect);
    tries("reflection", ConnectJdbcProgram::reflection);
    tries("binary", ConnectJdbcProgram::types);
    tries("nulls", ConnectJdbcProgram::nulls);
    tries("temporary", ConnectJdbcProgram::temporary);
    tries("fetching", ConnectJdbcProgram::fetching);
    tries("cancel", ConnectJdbcProgram::cancel);
    tries("error", ConnectJdbcProgram::error);
    tries("view", ConnectJdbcProgram::view);
    tries("fresh", ConnectJdbcProgram::fresh);
    tries("large", ConnectJdbcProgram::large);
    // The driver's own threads must not keep the program.
    System.exit(0);
  }

  private static void connect(Connection db) throws Exception {
    check(db.getMetaData().getDatabaseMajorVersion(), 4);
    check(db.isValid(10), true);
    check(one(db, "SELECT count(*) FROM orders"), 1_000L);
  }

  private static void reflection(Connection db) throws Exception {
    Set<String> tables = new HashSet<>();
    try (ResultSet found = db.getMetaData().getTables("spark_catalog", "default", "%", null)) {
      while (found.next()) {
        tables.add(found.getString("TABLE_NAME"));
      }
    }
    check(tables.containsAll(Set.of("kinds", "orders", "many", "spent")), true);
    ResultSet columns = db.getMetaData().getColumns("spark_catalog", "default", "orders", "%");
    check(strings(columns, "COLUMN_NAME"), List.of("id", "customer", "amount"));
    try (Statement statement = db.createStatement()) {
      ResultSet shown = statement.executeQuery("SHOW TABLES");
      check(new HashSet<>(strings(shown, "tableName")).contains("orders"), true);
    }
  }

  private static void types(Connection db) throws Exception {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("SELECT * FROM kinds WHERE id = 17")) {
      check(row.next(), true);
      check(row.getBoolean("flag"), true);
      check(row.getByte("tiny"), (byte) 17);
      check(row.getShort("small"), (short) 17);
      check(row.getInt("whole"), -51);
      check(row.getLong("large"), 17_000_000_000_000L);
      check(row.getFloat("single"), 17.5f);
      check(row.getDouble("twice"), 2.125);
      check(row.getBigDecimal("amount"), new BigDecimal("17.125"));
      check(row.getString("word"), "text 17 ü, 'quoted'");
      check(row.getString("short"), "s17");
      check(row.getString("fixed"), "c17   ");
      check(row.getBytes("raw").length, 3);
      check(row.getDate("day").toString(), "2000-01-18");
      check(row.getTimestamp("moment").toInstant().toString(), "2026-01-01T00:00:17.000001Z");
      check(row.getObject("clock") != null, true);
      check(row.getObject("list") != null, true);
      check(row.getObject("pairs") != null, true);
      check(row.getObject("both") != null, true);
    }
  }

  private static void nulls(Connection db) throws Exception {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("SELECT * FROM kinds WHERE flag IS NULL")) {
      int count = 0;
      while (row.next()) {
        count++;
        for (int column = 2; column <= row.getMetaData().getColumnCount(); column++) {
          check(row.getObject(column), null);
        }
      }
      check(count, 1_000);
    }
  }

  private static void temporary(Connection db) throws Exception {
    run(db, "CREATE OR REPLACE TEMPORARY VIEW few AS SELECT * FROM orders WHERE id < 7");
    check(one(db, "SELECT count(*) FROM few"), 7L);
  }

  private static void fetching(Connection db) throws Exception {
    try (Statement statement = db.createStatement()) {
      try (ResultSet row = statement.executeQuery("SELECT id FROM many ORDER BY id")) {
        for (long number = 0; number < 5_000; number++) {
          check(row.next(), true);
          check(row.getLong(1), number);
        }
      }
    }
  }

  private static void cancel(Connection db) throws Exception {
    List<SQLException> caught = new ArrayList<>();
    try (Statement statement = db.createStatement()) {
      Thread running =
          new Thread(
              () -> {
                try {
                  statement.executeQuery(FOREVER).next();
                } catch (SQLException failed) {
                  caught.add(failed);
                }
              });
      running.start();
      while (running.isAlive()) {
        statement.cancel();
        running.join(500);
      }
    }
    check(caught.size(), 1);
    check(one(db, "SELECT count(*) FROM orders"), 1_000L);
  }

  private static void error(Connection db) throws Exception {
    expect(db, "SELECT nope FROM orders", "42703");
    expect(db, "SELEC 1", "42601");
    expect(db, "SELECT * FROM nowhere", "42P01");
    expect(db, "CREATE MATERIALIZED VIEW x REFRESH POLICY SOMETIMES AS SELECT 1", "42601");
    expect(db, "DROP MATERIALIZED VIEW nowhere", "42P01");
  }

  private static void expect(Connection db, String text, String state) throws SQLException {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery(text)) {
      row.next();
    } catch (SQLException failed) {
      check(state + ": " + text, failed.getSQLState() + ": " + text);
      return;
    }
    throw new AssertionError("a wrong statement was taken: " + text);
  }

  private static void view(Connection db) throws Exception {
    run(db, "CREATE TABLE words (word STRING)");
    run(
        db,
        "CREATE MATERIALIZED VIEW lengths AS SELECT word, count(*) AS n FROM words GROUP BY word");
    check(one(db, "SELECT n FROM spent WHERE customer = 'customer 3'"), 100L);
  }

  private static void fresh(Connection db) throws Exception {
    for (long number = 1; number < 4; number++) {
      run(db, "INSERT INTO words VALUES ('one')");
      check(one(db, "SELECT n FROM lengths WHERE word = 'one'"), number);
    }
  }

  private static void large(Connection db) throws Exception {
    long sum = 0;
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery("SELECT * FROM many")) {
      while (row.next()) {
        sum += row.getLong(1);
      }
    }
    check(sum, 200_000L * 199_999 / 2);
  }

  private static void tries(String key, Attempt attempt) {
    try (Connection db = DriverManager.getConnection(url)) {
      attempt.run(db);
      tell("yes", key);
    } catch (Exception | AssertionError failed) {
      System.err.println("-- " + key);
      failed.printStackTrace();
      String text = String.valueOf(failed.getMessage()).split("\n| SQLSTATE:")[0].replace("\t", " ");
      String reason = failed.getClass().getSimpleName() + ": " + text;
      tell("no", key, reason.substring(0, Math.min(200, reason.length())));
    }
  }

  private static void tell(String... parts) {
    System.out.println(String.join("\t", parts));
  }

  private static void run(Connection db, String text) throws SQLException {
    try (Statement statement = db.createStatement()) {
      statement.execute(text);
    }
  }

  private static long one(Connection db, String text) throws SQLException {
    try (Statement statement = db.createStatement();
        ResultSet row = statement.executeQuery(text)) {
      row.next();
      return row.getLong(1);
    }
  }

  private static List<String> strings(ResultSet found, String column) throws SQLException {
    List<String> values = new ArrayList<>();
    try (found) {
      while (found.next()) {
        values.add(found.getString(column));
      }
    }
    return values;
  }

  private static void check(Object found, Object wanted) {
    if (!Objects.equals(found, wanted)) {
      throw new AssertionError("found " + found + " and not " + wanted);
    }
  }
}
