-- Customers by their spending after a purchase: scalar subqueries as the bounds of a BETWEEN.
with buyers as (
  select distinct c_customer_sk, c_current_addr_sk
  from (
    select cs_sold_date_sk as day, cs_bill_customer_sk as customer, cs_item_sk as item_sk
    from catalog_sales
    union all
    select ws_sold_date_sk, ws_bill_customer_sk, ws_item_sk from web_sales
  ) as sold
  join item on i_item_sk = item_sk
  join date_dim on d_date_sk = day
  join customer on c_customer_sk = sold.customer
  where i_category = 'Women' and i_class = 'maternity' and d_moy = 12 and d_year = 1998
),
spent as (
  select c_customer_sk, sum(ss_ext_sales_price) as revenue
  from buyers
  join store_sales on ss_customer_sk = c_customer_sk
  join customer_address on ca_address_sk = c_current_addr_sk
  join store on s_county = ca_county and s_state = ca_state
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_month_seq between
    (select distinct m.d_month_seq + 1 from date_dim as m where m.d_year = 1998 and m.d_moy = 12)
    and
    (select distinct m.d_month_seq + 3 from date_dim as m where m.d_year = 1998 and m.d_moy = 12)
  group by c_customer_sk
),
segments as (
  select cast(revenue / 50 as int) as segment from spent
)
select segment, count(*) as num_customers, segment * 50 as segment_base
from segments
group by segment
order by segment, num_customers, segment_base
limit 100
